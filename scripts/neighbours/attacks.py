"""One attack each, named after its line in docs/security.md; runs until it is killed: attacks.py NAME FOLDER."""

import os
import socket
import struct
import subprocess
import sys
import time

from peers import *


def full_call(folder):
    """A front end's call eventfd blocks when it is written, and is full, while requests end all the time."""
    call = os.eventfd(0)
    fill(call)
    guest = Guest(f"{folder}/a.vhost", call=call)
    done = 0
    while True:
        for slot in range(8):
            guest.request(slot, 0, slot * 8, [(0x200000 + slot * 4096, 4096)])
        done += 8
        guest.wake()
        guest.wait_used(done)


def foreign_memory(folder):
    """Guest memory in a regular file, again and again."""
    path = f"{folder}/memory"
    with open(path, "wb") as f:
        f.truncate(1 << 24)
    fd = os.open(path, os.O_RDWR)
    while True:
        try:
            session = VhostUser(f"{folder}/a.vhost")
            for _ in range(20):
                assert session.memory([(0, 1 << 24, USER, 0)], [fd]) != 0
                time.sleep(0.001)
        except (EOFError, OSError):
            time.sleep(0.01)


def hung_file(folder):
    """32 writes, 16 flushes and 16 trims wait on a hung file."""
    control(folder, "set slow.img write,read,fsync,fallocate hold")
    clients = [Nbd(f"{folder}/nbd", "slow") for _ in range(4)]
    for client in clients:
        for i in range(8):
            client.send(NBD_WRITE, i * 65536, 65536, bytes(65536))
        for i in range(4):
            client.send(NBD_FLUSH, 0, 0)
            client.send(4, i << 20, 1 << 20)
    time.sleep(3600)


def control(folder, line):
    with open(f"{folder}/medium/.control", "w") as f:
        f.write(line + "\n")


def odd_addresses(folder):
    """Reads into odd addresses of a direct disk whose medium takes 50 ms each."""
    control(folder, "set direct.img read,write delay 50 50")
    guest = Guest(f"{folder}/direct.vhost")
    done = 0
    while True:
        for slot in range(8):
            guest.request(slot, 0, slot * 64, [(0x200001 + slot * 65536, 32768)])
        done += 8
        guest.wake()
        guest.wait_used(done)


def long_reads(folder):
    """64 requests of 32 MiB at a time over NBD."""
    clients = [Nbd(f"{folder}/nbd", "a") for _ in range(1)]
    for client in clients:
        for _ in range(64):
            client.send(NBD_READ, 0, 32 << 20)
    while True:
        for client in clients:
            assert client.simple_reply(32 << 20) == 0
            client.send(NBD_READ, 0, 32 << 20)


def long_ring_reads(folder):
    """Eight requests of 32 MiB at a time over vhost-user."""
    guest = Guest(f"{folder}/a.vhost")
    done = 0
    while True:
        for slot in range(8):
            guest.request(slot, 0, 0, [(0x200000, 32 << 20)])
        done += 8
        guest.wake()
        guest.wait_used(done)


def four_jobs(folder):
    """Four NBD connections with 256 reads of 1 MiB each."""
    clients = [Nbd(f"{folder}/nbd", "a") for _ in range(4)]
    for client in clients:
        for i in range(256):
            client.send(NBD_READ, i % 128 << 20, 1 << 20)
    while True:
        for client in clients:
            assert client.simple_reply(1 << 20) == 0
            client.send(NBD_READ, 0, 1 << 20)


def four_ring_jobs(folder):
    """Four rings of a guest with 256 reads of 1 MiB each."""
    guest = Guest(f"{folder}/a.vhost", entries=1024, start=False)
    jobs = [Job(guest, index) for index in range(4)]
    while True:
        for job in jobs:
            job.again()
        time.sleep(0.0002)


def small_jobs(folder):
    """Four rings of a guest with 256 reads of 4 KiB each."""
    guest = Guest(f"{folder}/a.vhost", entries=1024, start=False)
    jobs = [Job(guest, index, 4096) for index in range(4)]
    while True:
        for job in jobs:
            job.again()


def block_status(folder):
    """Block status of a whole file of 20,000 extents, 16 at a time."""
    client = Nbd(f"{folder}/nbd", "fragmented", contexts=True)
    for _ in range(16):
        client.send(NBD_BLOCK_STATUS, 0, client.size)
    while True:
        client.structured_reply()
        client.send(NBD_BLOCK_STATUS, 0, client.size)


def questions(folder):
    """SIGHUP and control commands while a disk's medium hangs on everything."""
    control(folder, "set slow.img getattr,read,write,fsync hold")
    server = int(open(f"{folder}/pid").read())
    while True:
        os.kill(server, 1)
        subprocess.run([os.environ["PVBLK"], "ctl", "memory", "--control", f"unix:{folder}/control"], capture_output=True, timeout=120)
        time.sleep(0.05)


def sparse_memory(folder):
    """Memory of 16 GiB that nobody allocated, again and again."""
    while True:
        try:
            session = VhostUser(f"{folder}/a.vhost")
            fd = memfd(16 << 30)
            session.memory([(0, 16 << 30, USER, 0)], [fd])
            os.close(fd)
        except (EOFError, OSError):
            time.sleep(0.01)


def deaf_clients(folder):
    """32 NBD clients ask for 64 MiB each and read nothing."""
    clients = []
    for _ in range(32):
        client = Nbd(f"{folder}/nbd", "a")
        for i in range(64):
            client.send(NBD_READ, i << 20, 1 << 20)
        clients.append(client)
    time.sleep(3600)


def handshakes(folder):
    """64 handshakes that say nothing, and 255 LIST options in each of eight more."""
    idle = [Nbd(f"{folder}/nbd", None) for _ in range(64)]
    while True:
        some = []
        for _ in range(8):
            try:
                client = Nbd(f"{folder}/nbd", None)
                client.socket.sendall((b"IHAVEOPT" + struct.pack(">II", OPT_LIST, 0)) * 255)
                some.append(client)
            except (EOFError, OSError):
                pass
        time.sleep(0.2)
        for client in some:
            client.socket.close()


def huge_memory(folder):
    """As much memory as is taken, in as many regions, with 64 rings."""
    size = 16 << 30
    while True:
        try:
            session = VhostUser(f"{folder}/a.vhost")
            fd = memfd(size)
            for i in range(64):
                region = struct.pack("<Q4Q", 0, i * size, size, USER + i * size, 0)
                if session.ask(ADD_MEM_REG, region, (fd,)) != 0:
                    break
            os.close(fd)
        except (EOFError, OSError):
            time.sleep(0.01)


def messages(folder):
    """SET_MEM_TABLE as fast as it goes."""
    session = VhostUser(f"{folder}/a.vhost")
    fd = memfd(1 << 24)
    while True:
        for _ in range(32):
            table = struct.pack("<II", 1, 0) + struct.pack("<4Q", 0, 1 << 24, USER, 0)
            session.tell(SET_MEM_TABLE, table, (fd,))


def reconnects(folder):
    """Connects and hangs up as fast as it goes."""
    while True:
        try:
            client = socket.socket(socket.AF_UNIX)
            client.connect(f"{folder}/a.vhost")
            client.sendall(struct.pack("<III", GET_FEATURES, 1, 0))
        except OSError:
            time.sleep(0.001)
        client.close()


def no_kick(folder):
    """64 rings without a kick."""
    guest = Guest(f"{folder}/a.vhost", entries=8, start=False)
    for index in range(64):
        guest.ring(index, None, base=index * 0x10000)
    time.sleep(3600)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
