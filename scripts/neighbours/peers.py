"""Raw clients that keep no rule: an NBD connection and a vhost-user guest. Standard library only."""

import array
import mmap
import os
import socket
import struct
import time

NBD_READ, NBD_WRITE, NBD_FLUSH, NBD_BLOCK_STATUS = 0, 1, 3, 7
# Option numbers of the NBD handshake.
OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST, OPT_GO, OPT_STRUCTURED_REPLY, OPT_SET_META_CONTEXT = 1, 2, 3, 7, 8, 10
USER = 0x7F0000000000


class Nbd:
    """A connection to one export, past its handshake unless `export` is None."""

    def __init__(self, path, export, contexts=False):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        assert self.take(16)[:8] == b"NBDMAGIC"
        self.take(2)
        self.socket.sendall(struct.pack(">I", 3))
        self.handle = 0
        if export is None:
            return
        name = export.encode()
        if contexts:
            self.option(OPT_STRUCTURED_REPLY)
            context = b"base:allocation"
            self.option(OPT_SET_META_CONTEXT, struct.pack(">I", len(name)) + name + struct.pack(">II", 1, len(context)) + context)
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", OPT_EXPORT_NAME, len(name)) + name)
        self.size = struct.unpack(">Q", self.take(8))[0]
        self.take(2)

    def option(self, number, data=b""):
        """Sends an option and reads its replies up to the acknowledgement."""
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", number, len(data)) + data)
        while True:
            _, _, kind, length = struct.unpack(">QIII", self.take(20))
            self.take(length)
            if kind == 1 or kind >= 1 << 31:
                return

    def take(self, n):
        data = bytearray()
        while len(data) < n:
            more = self.socket.recv(min(n - len(data), 1 << 20))
            if not more:
                raise EOFError("the server closed the connection")
            data += more
        return bytes(data)

    def skip(self, n, into=bytearray(1 << 20)):
        """Reads `n` bytes and drops them."""
        while n:
            got = self.socket.recv_into(into, min(n, len(into)))
            if not got:
                raise EOFError("the server closed the connection")
            n -= got

    def send(self, command, offset, length, data=b""):
        self.handle += 1
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, command, self.handle, offset, length) + data)

    def simple_reply(self, data_bytes=0):
        _, error, _ = struct.unpack(">IIQ", self.take(16))
        if not error:
            self.skip(data_bytes)
        return error

    def structured_reply(self):
        """Drops the chunks of one reply."""
        while True:
            _, flags, _, _, length = struct.unpack(">IHHQI", self.take(20))
            self.skip(length)
            if flags & 1:
                return


def memfd(size):
    fd = os.memfd_create("guest", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


# vhost-user message numbers.
GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES = 12, 13, 15, 16
SET_VRING_ENABLE, ADD_MEM_REG = 18, 37


class VhostUser:
    """A front end's socket after the negotiation of all features."""

    def __init__(self, path, without=1 << 29):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        features = self.ask(GET_FEATURES)
        self.tell(SET_OWNER)
        protocol = self.ask(GET_PROTOCOL_FEATURES)
        self.tell(SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol))
        self.ask(SET_FEATURES, struct.pack("<Q", features & ~without))

    def send(self, code, payload=b"", fds=(), flags=9):
        message = struct.pack("<III", code, flags, len(payload)) + payload
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([message], ancillary)

    def tell(self, code, payload=b"", fds=()):
        """Without an answer."""
        self.send(code, payload, fds, flags=1)

    def ask(self, code, payload=b"", fds=()):
        """The answer as a number, or as bytes if it isn't one."""
        self.send(code, payload, fds)
        head = self.take(12)
        body = self.take(struct.unpack("<III", head)[2])
        return struct.unpack("<Q", body)[0] if len(body) == 8 else body

    def take(self, n):
        data = b""
        while len(data) < n:
            more = self.socket.recv(n - len(data))
            if not more:
                raise EOFError("the server closed the session")
            data += more
        return data

    def memory(self, regions, fds):
        table = b"".join(struct.pack("<4Q", *r) for r in regions)
        return self.ask(SET_MEM_TABLE, struct.pack("<II", len(regions), 0) + table, fds)


class Guest(VhostUser):
    """A guest with one ring of `entries` at address 0 of its memory, and 1 MiB behind it for request headers."""

    def __init__(self, path, size=64 << 20, entries=256, call=None, start=True):
        super().__init__(path)
        self.entries, self.size = entries, size
        self.fd = memfd(size)
        self.map = mmap.mmap(self.fd, size)
        self.available = 0
        self.kick = os.eventfd(0, os.EFD_NONBLOCK)
        self.call = os.eventfd(0, os.EFD_NONBLOCK) if call is None else call
        assert self.memory([(0, size, USER, 0)], [self.fd]) == 0
        if start:
            self.ring(0, self.kick)

    def ring(self, index, kick, base=0):
        at = USER + base
        self.ask(SET_VRING_NUM, struct.pack("<II", index, self.entries))
        self.ask(SET_VRING_BASE, struct.pack("<II", index, 0))
        self.ask(SET_VRING_ADDR, struct.pack("<IIQQQQ", index, 0, at, at + 0x8000, at + 0x4000, 0))
        self.ask(SET_VRING_CALL, struct.pack("<Q", index), (self.call,))
        which = index if kick is not None else index | 1 << 8
        self.ask(SET_VRING_KICK, struct.pack("<Q", which), () if kick is None else (kick,))
        self.ask(SET_VRING_ENABLE, struct.pack("<II", index, 1))

    def used(self):
        return struct.unpack_from("<H", self.map, 0x8002)[0]

    def request(self, slot, kind, sector, pieces):
        """Makes one request available; `pieces` are (address, bytes). Each slot has 32 descriptors."""
        head, header = slot * 32, 0x100000 + slot * 64
        struct.pack_into("<IIQ", self.map, header, kind, 0, sector)
        device_writes = 2 if kind == 0 else 0
        chain = [(header, 16, 0)] + [(a, n, device_writes) for a, n in pieces] + [(header + 32, 1, 2)]
        for i, (address, length, flags) in enumerate(chain):
            last = i + 1 == len(chain)
            flags |= 0 if last else 1
            struct.pack_into("<QIHH", self.map, (head + i) * 16, address, length, flags, head + i + 1)
        struct.pack_into("<H", self.map, 0x4004 + 2 * (self.available % self.entries), head)
        self.available = (self.available + 1) & 0xFFFF
        struct.pack_into("<H", self.map, 0x4002, self.available)

    def wake(self):
        os.eventfd_write(self.kick, 1)

    def wait_used(self, until):
        while self.used() != until & 0xFFFF:
            time.sleep(0.0002)



class Job:
    """A ring of `guest`, which has 1024 entries each, with 256 reads at work all the time."""

    DEPTH = 256

    def __init__(self, guest, index, size=1 << 20):
        self.guest, self.base, self.done = guest, index * 0x10000, 0
        self.kick = os.eventfd(0, os.EFD_NONBLOCK)
        guest.ring(index, self.kick, base=self.base)
        for slot in range(self.DEPTH):
            at, header = self.base + slot * 4 * 16, 0x100000 + (index * self.DEPTH + slot) * 64
            struct.pack_into("<IIQ", guest.map, header, 0, 0, slot * size // 512)
            chain = [(header, 16, 1), (0x200000, size, 3), (header + 32, 1, 2)]
            for i, (address, length, flags) in enumerate(chain):
                struct.pack_into("<QIHH", guest.map, at + i * 16, address, length, flags, slot * 4 + i + 1)
        self.offer(range(self.DEPTH))

    def offer(self, slots):
        """Makes the requests of these slots available."""
        ring, index = self.base + 0x4000, struct.unpack_from("<H", self.guest.map, self.base + 0x4002)[0]
        for slot in slots:
            struct.pack_into("<H", self.guest.map, ring + 4 + 2 * (index % 1024), slot * 4)
            index = (index + 1) & 0xFFFF
        struct.pack_into("<H", self.guest.map, ring + 2, index)
        os.eventfd_write(self.kick, 1)

    def again(self):
        """Offers the slots again whose requests have ended."""
        used = struct.unpack_from("<H", self.guest.map, self.base + 0x8002)[0]
        slots = []
        while self.done != used:
            entry = self.base + 0x8004 + 8 * (self.done % 1024)
            slots.append(struct.unpack_from("<I", self.guest.map, entry)[0] // 4)
            self.done = (self.done + 1) & 0xFFFF
        if slots:
            self.offer(slots)


def fill(fd):
    """An eventfd that takes no further count."""
    os.eventfd_write(fd, 0xFFFFFFFFFFFFFFFE)
