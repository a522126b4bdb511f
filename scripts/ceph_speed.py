#!/usr/bin/env python3
"""Speed of an image of a Ceph cluster of this machine: fio's rbd engine, qemu-storage-daemon's rbd driver and pvblk, in turns, on one image.

usage: ceph_speed.py PVBLK [--turns N] [--seconds N] [--sizes 4k,128k] [--depths 1,16,64] [--rw randread,randwrite] [--json FILE]
       ceph_speed.py PVBLK --cache [--exports vhost-user,rings,nbd,inside] [the same]

fio is its own load; the load of both servers is `pvblk bench` over vhost-user-blk. `direct` is `pvblk bench` on the image itself, without a server. librbd's
cache is off everywhere. `again` is fio a second time, so its ratio to fio says how exact the others are. CPU: of the process with librbd (so of the load as
well where that is fio or `direct`), for each request, in microseconds.

--cache: random reads of 64 MiB through `pvblk serve`: `remote` is the image, `cached` one with a cache that holds all of it, `memory` a disk in memory, which is
as much as an export and its client can do. `polls`: the client polls instead of sleeping. `inside` is `pvblk bench` on the volumes themselves, without an
export. The ratios are to `remote`, whose client sleeps; `again` is `remote` once more. A read that missed the cache ends the script.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile

import pairs
from pairs import Load, Server, run

PORT = "13400"
IMAGE_MIB = 512
# What is read with --cache.
SET_MIB = 64
SPIN_US = 200


class Cluster:
    def __init__(self, folder):
        self.folder, self.script = folder, f"{pairs.ROOT}/scripts/ceph.sh"
        self.env = dict(os.environ, PORT=PORT, GRACE="120", OSD_BYTES=str(8 << 30))
        run([self.script, "start", f"{folder}/c"], env=self.env)
        self.conf = f"{folder}/c/ceph.conf"
        with open(self.conf, "a") as f:
            f.write("rbd_cache = false\n")
        os.environ["CEPH_CONF"] = self.conf

    def image(self, name, mib):
        """An image each of whose parts has its space."""
        run(["rbd", "-c", self.conf, "create", "--size", f"{mib}M", f"rbd/{name}"])
        fill = ["rbd", "-c", self.conf, "bench", "--io-type", "write", "--io-pattern", "seq", "--io-size", "4M"]
        run(fill + ["--io-threads", "4", "--io-total", f"{mib}M", f"rbd/{name}"])

    def spec(self, name):
        return f"rbd:rbd/{name},conf={self.conf}"

    def end(self):
        subprocess.run([self.script, "wipe", f"{self.folder}/c"], env=self.env)


class Beside:
    """Ways to the image `speed`, each of which has the image for itself."""

    def __init__(self, cluster):
        self.cluster, self.folder = cluster, cluster.folder
        cluster.image("speed", IMAGE_MIB)
        self.ways = {"fio": self.fio, "daemon": self.daemon, "pvblk": self.pvblk, "direct": self.direct, "again": self.fio}

    def fio(self, load):
        return pairs.fio(load, ["--ioengine=rbd", "--clientname=admin", "--pool=rbd", "--rbdname=speed"])

    def served(self, load, command, socket, ready=None):
        server = Server(command, socket, ready)
        try:
            return pairs.bench(PVBLK, self.folder, load, f"vhost-user:unix:{socket}", server.pid)
        finally:
            server.end()
            if os.path.exists(socket):
                os.unlink(socket)

    def pvblk(self, load):
        socket = f"{self.folder}/pvblk.sock"
        disk = ["--disk", f"speed={self.cluster.spec('speed')}", "--vhost-user", f"speed=unix:{socket}"]
        return self.served(load, [PVBLK, "serve", "--control", "none"] + disk, socket)

    def daemon(self, load):
        socket = f"{self.folder}/daemon.sock"
        node = f"driver=rbd,node-name=n,pool=rbd,image=speed,conf={self.cluster.conf},user=admin,cache.direct=on"
        export = f"type=vhost-user-blk,id=e,node-name=n,writable=on,addr.type=unix,addr.path={socket}"
        command = ["qemu-storage-daemon", "--blockdev", node, "--export", export]
        return self.served(load, command, socket, lambda: os.path.exists(socket))

    def direct(self, load):
        return pairs.bench(PVBLK, self.folder, load, self.cluster.spec("speed"))


class Cached:
    """One server of an image, of another one behind a cache, and of memory; and two more images that `pvblk bench` opens itself."""

    def __init__(self, cluster):
        self.cluster, self.folder = cluster, cluster.folder
        for name in ("remote", "cached", "inside", "inside-cached"):
            cluster.image(name, SET_MIB)
        self.inside_cached = f"cache:{4 * SET_MIB}M:{cluster.spec('inside-cached')}"
        disks = {"remote": cluster.spec("remote"), "cached": f"cache:{4 * SET_MIB}M:{cluster.spec('cached')}", "memory": f"mem:{SET_MIB}M"}
        self.control = f"unix:{self.folder}/control.sock"
        command = [PVBLK, "serve", "--control", self.control, "--local", f"unix:{self.folder}/rings.sock", "--nbd", f"unix:{self.folder}/nbd.sock"]
        for name, spec in disks.items():
            command += ["--disk", f"{name}={spec}", "--vhost-user", f"{name}=unix:{self.folder}/{name}.sock"]
        self.server = Server(command, f"{self.folder}/server")
        for name, rw in (("cached", "read"), ("memory", "write")):
            run([PVBLK, "bench", "--target", self.target("nbd", name), f"--rw={rw}", "--bs=1m"])
        self.read = self.below()

    def below(self):
        """Bytes that the cache has read from the image."""
        stat = json.loads(run([PVBLK, "cache", "cached", "--control", self.control, "--json"]))
        return stat["pgpgin"]

    def target(self, export, disk):
        socket = f"unix:{self.folder}"
        return {
            "vhost-user": f"vhost-user:{socket}/{disk}.sock",
            "rings": f"rings:{socket}/rings.sock,disk={disk}",
            "nbd": f"nbd+unix:///{disk}?socket={self.folder}/nbd.sock",
        }[export]

    def served(self, export, disk, spin):
        def way(load):
            found = pairs.bench(PVBLK, self.folder, load, self.target(export, disk), self.server.pid, spin)
            if self.below() != self.read:
                raise SystemExit(f"{load} over {export}: reads missed the cache")
            return found

        return way

    def remote_inside(self, load):
        return pairs.bench(PVBLK, self.folder, load, self.cluster.spec("inside"))

    def cached_inside(self, load):
        """Reads all once, and then measures."""
        job, said = f"{self.folder}/job.fio", f"{self.folder}/bench.json"
        with open(job, "w") as f:
            f.write(f"[warm]\nrw=read\nbs=1m\n\n[hits]\nstonewall\nrw={load.rw}\nbs={load.size}\niodepth={load.depth}\n")
            f.write(f"time_based\nruntime={load.seconds}\n")
        return pairs.measured(load, [PVBLK, "bench", job, "--target", self.inside_cached, "--json", said], said)

    def ways(self, export):
        if export == "inside":
            return {"remote": self.remote_inside, "cached": self.cached_inside, "again": self.remote_inside}
        ways = {}
        for disk in ("remote", "cached", "memory"):
            ways[disk] = self.served(export, disk, 0)
            ways[f"{disk}, polls"] = self.served(export, disk, SPIN_US)
        ways["again"] = ways["remote"]
        return ways

    def end(self):
        self.server.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs.arguments(parser, turns=10, seconds=5)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--exports", default="vhost-user,rings,nbd,inside")
    options = parser.parse_args()
    sizes, depths = options.sizes.split(","), options.depths.split(",")
    exports = options.exports.split(",")
    global PVBLK
    PVBLK = os.path.abspath(options.pvblk)
    report = pairs.Report(options.json, {"pvblk": [PVBLK, "--version"], "fio": ["fio", "--version"], "ceph": ["ceph", "--version"],
                                         "qemu-storage-daemon": ["qemu-storage-daemon", "--version"]})
    folder = tempfile.mkdtemp(prefix="pvblk-speed-", dir="/dev/shm")
    # A server that ends because of the script's own end is told so in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cluster = None
    try:
        cluster = Cluster(folder)
        if options.cache:
            pairs.announce(options, len(sizes) * len(depths) * sum(3 if e == "inside" else 7 for e in exports))
            cached = Cached(cluster)
            try:
                for load in [Load(options, "randread", size, depth) for size in sizes for depth in depths]:
                    for export in exports:
                        found = pairs.turns(options, load, cached.ways(export))
                        report.tell(f"{export}, {load}", found, "remote")
                        if "memory" in found:
                            report.tell(f"{export}, {load}", found, "memory", ["cached"])
                            report.tell(f"{export}, {load}", found, "memory, polls", ["cached, polls"])
                        report.keep(load, found, export=export)
            finally:
                cached.end()
            return
        pairs.announce(options, 5 * len(sizes) * len(depths) * len(options.rw.split(",")))
        beside = Beside(cluster)
        for load in [Load(options, rw, size, depth) for size in sizes for depth in depths for rw in options.rw.split(",")]:
            found = pairs.turns(options, load, beside.ways)
            report.tell(load, found, "fio")
            report.keep(load, found)
    finally:
        if cluster:
            cluster.end()
        subprocess.run(["rm", "-rf", folder])


main()
