#!/usr/bin/env python3
"""A server in a sandbox beside one without, in turns: requests a second over NBD (fio), rings and vhost-user (pvblk bench).

usage: sandbox_speed.py PVBLK [--user USER] [--turns N] [--seconds N] [--sizes 4k] [--depths 1,32] [--rw randread] [--file PATH] [--json FILE]

The disk is 256 MiB of memory; with --file a file there, whose requests go over io_uring. `again` is a second server without a sandbox. As root.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import pairs
from pairs import Load, Server


class Bed:
    """The three servers, with all their exports."""

    def __init__(self, options, folder):
        self.folder, self.servers = folder, {}
        volume = "mem:256M"
        if options.file:
            volume = f"file:{options.file},size=256M,nolock"
        for name, more in (("plain", []), ("sandbox", ["--sandbox", options.user]), ("again", [])):
            at = f"{folder}/{name}"
            command = [PVBLK, "serve", "--control", "none", "--disk", f"d={volume}", "--nbd", f"unix:{at}.nbd", "--local", f"unix:{at}.rings",
                       "--vhost-user", f"d=unix:{at}.vhost", *more]
            self.servers[name] = Server(command, at)

    def end(self):
        for server in self.servers.values():
            server.end()

    def ways(self, route):
        def way(name):
            at = f"{self.folder}/{name}"
            targets = {"rings": f"rings:unix:{at}.rings,disk=d", "vhost-user": f"vhost-user:unix:{at}.vhost"}
            if route == "nbd":
                return lambda load: pairs.fio(load, ["--ioengine=nbd", f"--uri=nbd+unix:///d?socket={at}.nbd"])
            return lambda load: pairs.bench(PVBLK, self.folder, load, targets[route], spin=50)

        return {name: way(name) for name in self.servers}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs.arguments(parser, turns=10, seconds=2)
    parser.set_defaults(sizes="4k", depths="1,32", rw="randread")
    parser.add_argument("--user", default="nobody")
    parser.add_argument("--file")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("sandbox_speed.py: only root can serve as another user")
    global PVBLK
    PVBLK = os.path.abspath(options.pvblk)
    loads = [Load(options, rw, size, depth) for size in options.sizes.split(",") for depth in options.depths.split(",") for rw in options.rw.split(",")]
    report = pairs.Report(options.json, {"pvblk": [PVBLK, "--version"], "fio": ["fio", "--version"]})
    routes = ("nbd", "rings", "vhost-user")
    pairs.announce(options, 3 * len(routes) * len(loads))
    folder = tempfile.mkdtemp(prefix="pvblk-speed-", dir="/dev/shm")
    bed = Bed(options, folder)
    try:
        for route in routes:
            for load in loads:
                found = pairs.turns(options, load, bed.ways(route))
                report.tell(f"{route}, {load}", found, "plain")
                report.keep(load, found, route=route)
    finally:
        bed.end()
        subprocess.run(["rm", "-rf", folder])


main()
