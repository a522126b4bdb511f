#!/usr/bin/env python3
"""NBD volumes beside other clients and proxies of the same NBD server, in turns: rates, and CPU time for each request.

usage: nbd_speed.py PVBLK [--turns N] [--seconds N] [--sizes 4k,128k] [--depths 1,16,64] [--rw randread,randwrite] [--servers nbdkit,qemu-nbd]
                    [--copies yes|no|only] [--json FILE]

The servers are `nbdkit memory` and `qemu-nbd` of a file on tmpfs, on Unix sockets, with 512 MiB of random data. Everything runs on this machine, unpinned.

What is compared with what:
  served   a proxy between fio's nbd engine (libnbd) and the server: `pvblk serve --disk d=nbd+unix://...`, to `nbdkit nbd`. `keep=0` is pvblk without
           copies of writes that no flush covers, which nbdkit doesn't keep either. `fio` is the same load at the server itself, which is a hop less.
  inside   a client without a hop: `pvblk bench --target nbd+unix://...`, to fio's nbd engine.
  copy     `nbdcopy` of all from the server to nothing (out) and of a file into it (in): at the server itself, through pvblk, and through nbdkit. pvblk has
           no command that copies; `bench` reads all in order, with nbdcopy's requests (256 KiB, 64 in flight), over one connection. The whole time of the
           command counts.
`again` is the first one (nbdkit, fio, nbdcopy) a second time. CPU: of the proxy, else of the client; the server's is in none.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import pairs
from pairs import Load, Server, run

SIZE_MIB = 512


def uri(socket):
    return f"nbd+unix:///d?socket={socket}"


def nbdkit(folder, name, *plugin):
    socket = f"{folder}/{name}.sock"
    return socket, Server(["nbdkit", "-f", "-U", socket, *plugin], socket, lambda: pairs.accepts(socket))


class Bed:
    """A server, and the proxies before it."""

    def __init__(self, folder, kind):
        self.folder, self.file, self.servers = folder, f"{folder}/random", {}
        if not os.path.exists(self.file):
            with open(self.file, "wb") as f:
                for _ in range(SIZE_MIB):
                    f.write(os.urandom(1 << 20))
        try:
            self.start(kind)
        except BaseException:
            self.end()
            raise

    def start(self, kind):
        if kind == "nbdkit":
            self.at, self.servers["server"] = nbdkit(self.folder, "nbdkit-server", "memory", f"{SIZE_MIB}M")
        elif kind == "qemu-nbd":
            self.at, image = f"{self.folder}/qemu-nbd-server.sock", f"{self.folder}/image"
            with open(image, "wb") as f:
                f.truncate(SIZE_MIB << 20)
            command = ["qemu-nbd", "-t", "-e", "16", "-f", "raw", "-x", "d", "-k", self.at, image]
            self.servers["server"] = Server(command, self.at, lambda: pairs.accepts(self.at))
        else:
            sys.exit(f"no such server: {kind}")
        run(["nbdcopy", self.file, uri(self.at)])
        self.proxies = {}
        self.proxies["nbdkit"], self.servers["nbdkit"] = nbdkit(self.folder, f"{kind}-nbdkit", "nbd", f"uri={uri(self.at)}")
        for name, options in (("pvblk", ""), ("keep=0", ",keep=0")):
            self.proxies[name] = f"{self.folder}/{kind}-{name}.sock"
            command = [PVBLK, "serve", "--control", "none", "--disk", f"d={uri(self.at)}{options}", "--nbd", f"unix:{self.proxies[name]}"]
            self.servers[name] = Server(command, self.proxies[name])
        # Each way leads to the same data.
        for socket in (self.at, *self.proxies.values()):
            copy = f"{self.folder}/copy"
            run(["nbdcopy", uri(socket), copy])
            run(["cmp", copy, self.file])
            os.unlink(copy)

    def end(self):
        # The server last, so that the proxies have one until their end.
        for server in reversed(self.servers.values()):
            server.end()

    def fio(self, load):
        return pairs.fio(load, ["--ioengine=nbd", f"--uri={uri(self.at)}"])

    def bench(self, load):
        return pairs.bench(PVBLK, self.folder, load, uri(self.at))

    def served(self, name):
        engine = ["--ioengine=nbd", f"--uri={uri(self.proxies[name])}"]
        return lambda load: pairs.fio(load, engine, self.servers[name].pid)

    def ways(self, writes):
        ways = {"nbdkit": self.served("nbdkit"), "pvblk": self.served("pvblk"), "fio": self.fio, "bench": self.bench}
        if writes:
            ways["keep=0"] = self.served("keep=0")
        return ways | {"nbdkit again": ways["nbdkit"], "fio again": self.fio}

    def copied(self, command, pid=None):
        """MiB a second, and the seconds of CPU for each MiB."""
        before = pairs.cpu_seconds(pid) if pid else 0
        _, busy, took = pairs.timed(command)
        if pid:
            busy = pairs.cpu_seconds(pid) - before
        return SIZE_MIB / took, busy / SIZE_MIB

    def copies(self, direction):
        def nbdcopy(socket, name=None):
            command = {"out": ["nbdcopy", "--no-extents", uri(socket), "null:"], "in": ["nbdcopy", "--flush", self.file, uri(socket)]}[direction]
            return lambda _: self.copied(command, self.servers[name].pid if name else None)

        ways = {"nbdcopy": nbdcopy(self.at)}
        if direction == "out":
            read = [PVBLK, "bench", "--target", uri(self.at), "--rw=read", "--bs=256k", "--iodepth=64"]
            ways["bench"] = lambda _: self.copied(read)
        for name in ("nbdkit", "pvblk") + (("keep=0",) if direction == "in" else ()):
            ways[f"through {name}"] = nbdcopy(self.proxies[name], name)
        return ways | {"again": ways["nbdcopy"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs.arguments(parser, turns=5, seconds=3)
    parser.add_argument("--servers", default="nbdkit,qemu-nbd")
    parser.add_argument("--copies", choices=["yes", "no", "only"], default="yes")
    options = parser.parse_args()
    global PVBLK
    PVBLK = os.path.abspath(options.pvblk)
    kinds = options.servers.split(",")
    loads = [Load(options, rw, size, depth) for size in options.sizes.split(",") for depth in options.depths.split(",") for rw in options.rw.split(",")]
    loads = [] if options.copies == "only" else loads
    programs = {name: [name, "--version"] for name in ("fio", "nbdkit", "qemu-nbd", "nbdcopy")}
    report = pairs.Report(options.json, {"pvblk": [PVBLK, "--version"], **programs})
    pairs.announce(options, len(kinds) * sum(6 + ("write" in load.rw) for load in loads), 20 * len(kinds))
    folder = tempfile.mkdtemp(prefix="pvblk-speed-", dir="/dev/shm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for kind in kinds:
            bed = Bed(folder, kind)
            try:
                for load in loads:
                    ways = bed.ways("write" in load.rw)
                    found = pairs.turns(options, load, ways)
                    proxies = [name for name in ways if name not in ("bench", "fio again")]
                    report.tell(f"served, {kind}, {load}", found, "nbdkit", proxies)
                    report.tell(f"inside, {kind}, {load}", found, "fio", ["bench", "fio again"])
                    report.keep(load, found, server=kind)
                for direction in ("out", "in") if options.copies != "no" else ():
                    found = pairs.turns(options, None, bed.copies(direction))
                    report.tell(f"copy {direction}, {kind}, {SIZE_MIB} MiB", found, "nbdcopy", unit=" MiB/s")
                    report.tell(f"copy {direction}, {kind}, through a proxy", found, "through nbdkit", [n for n in found if n.startswith("through")], unit=" MiB/s")
                    report.keep(f"copy {direction}", found, server=kind, rate_unit="MiB/s", cpu_unit="us/MiB")
            finally:
                bed.end()
    finally:
        subprocess.run(["rm", "-rf", folder])


main()
