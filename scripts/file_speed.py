#!/usr/bin/env python3
"""Files that are in memory or in the page cache, over vhost-user: two builds of pvblk beside each other, memory, fio and qemu-storage-daemon, in turns.

usage: file_speed.py AFTER --before BEFORE [--files /dev/shm/a,/var/tmp/b] [--no-mem] [--no-qsd] [--turns N] [--seconds N] [--depths 1,32] [--rw randread]
                     [--direct] [--thinktime MICROSECONDS] [--json FILE]

The client (pvblk bench of AFTER, on CPU 0) sleeps or polls; each server has CPU 1, and all servers run all the time. `again` is a second server of
BEFORE. fio reads the file itself, on CPU 1 with one thread: `pread` one at a time whatever the depth. Files are 256 MiB and are written before. With --direct all bypass the page cache, fio by io_uring and with
the same depth as the others. With --thinktime every client, fio included, waits so long before each request.
"""

import argparse
import os
import shutil
import subprocess
import tempfile

import pairs
from pairs import Load, Server

CLIENT, SERVER = ["taskset", "-c", "0"], ["taskset", "-c", "1"]
MIB = 256


class Bed:
    """Servers of each build and file; `mem` is a disk in memory."""

    def __init__(self, options, folder, files):
        self.options, self.folder, self.servers, self.targets = options, folder, {}, {}
        direct, cache = (",direct", ",cache.direct=on,aio=io_uring") if options.direct else ("", "")
        builds = {"after": options.pvblk, "before": options.before, "again": options.before}
        for build, program in builds.items():
            for name, path in [("mem", None), *files.items()]:
                volume = f"file:{path},nolock{direct}" if path else f"mem:{MIB}M"
                at = f"{folder}/{build}-{name}"
                command = [*SERVER, program, "serve", "--control", "none", "--disk", f"d={volume}", "--vhost-user", f"d=unix:{at}"]
                self.add(build, name, at, Server(command, at))
        if not options.no_qsd and shutil.which("qemu-storage-daemon"):
            for name, path in files.items():
                at = f"{folder}/qsd-{name}"
                command = [*SERVER, "qemu-storage-daemon", "--object", "iothread,id=t", "--blockdev", f"driver=file,node-name=d,filename={path},locking=off{cache}",
                           "--export", f"type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={at},writable=on,num-queues=1,iothread=t"]
                self.add("qsd", name, at, Server(command, at, lambda at=at: os.path.exists(at)))

    def add(self, build, name, at, server):
        self.servers[f"{build} {name}"], self.targets[f"{build} {name}"] = server, f"vhost-user:unix:{at}"

    def end(self):
        for server in self.servers.values():
            server.end()

    def way(self, name, spin):
        def run(load):
            said = f"{self.folder}/bench.json"
            command = [*CLIENT, self.options.pvblk, "bench", "--target", self.targets[name], "--spin-us", str(spin), "--json", said]
            thinks = ["--option", f"thinktime={self.options.thinktime}us"] if self.options.thinktime else []
            return pairs.measured(load, command + thinks + load.options, said, self.servers[name].pid)
        return run

    def of(self, name, spin):
        """The ways to one volume."""
        return {build: self.way(f"{build} {name}", spin) for build in ("before", "after", "again", "qsd") if f"{build} {name}" in self.servers}


def by_fio(path, options):
    def run(load):
        way = ["--ioengine=io_uring", "--direct=1", f"--iodepth={load.depth}"] if options.direct else ["--ioengine=psync", "--invalidate=0"]
        command = [*SERVER, "fio", "--name=speed", "--output-format=json", "--norandommap", "--randrepeat=0", "--time_based", *way,
                   f"--filename={path}", "--thread", f"--thinktime={options.thinktime}", f"--rw={load.rw}", f"--bs={load.size}", f"--runtime={load.seconds}", f"--size={MIB}m"]
        return pairs.measured(load, command)
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs.arguments(parser, turns=5, seconds=1)
    parser.set_defaults(sizes="4k", depths="1,32", rw="randread")
    parser.add_argument("--before", required=True)
    parser.add_argument("--files", default="/dev/shm/pvblk-file,/var/tmp/pvblk-file")
    parser.add_argument("--no-qsd", action="store_true")
    parser.add_argument("--no-mem", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--thinktime", type=int, default=0)
    options = parser.parse_args()
    options.pvblk, options.before = os.path.abspath(options.pvblk), os.path.abspath(options.before)
    files = {}
    for path in options.files.split(","):
        kind = pairs.run(["findmnt", "-n", "-o", "FSTYPE", "-T", os.path.dirname(path)]).split()[0]
        with open(path, "wb") as f:
            for _ in range(MIB):
                f.write(os.urandom(1 << 20))
            os.fsync(f.fileno())
        files[kind] = path
    folder = tempfile.mkdtemp(prefix="pvblk-speed-", dir="/dev/shm")
    report = pairs.Report(options.json, {"after": [options.pvblk, "--version"], "before": [options.before, "--version"], "fio": ["fio", "--version"]})
    report.all["pinned"] = True
    bed = Bed(options, folder, files)
    loads = [Load(options, rw, size, depth) for rw in options.rw.split(",") for size in options.sizes.split(",") for depth in options.depths.split(",")]
    try:
        for name in [*([] if options.no_mem else ["mem"]), *files]:
            for load in loads:
                for client, spin in (("sleeps", 0), ("polls", 1000000)):
                    ways = bed.of(name, spin)
                    if name in files:
                        ways["fio"] = by_fio(files[name], options)
                    found = pairs.turns(options, load, ways)
                    report.tell(f"{name}, {load}, client {client}", found, "before", ["after", "again"])
                    for other in {"fio", "qsd"} & set(found):
                        report.tell(f"{name}, {load}, client {client}", found, other, ["after", "before"])
                    report.keep(load, found, volume=name, client=client)
    finally:
        bed.end()
        subprocess.run(["rm", "-rf", folder, *files.values()], check=False)


main()
