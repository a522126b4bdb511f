#!/usr/bin/env python3
"""CPU of a server for each byte of NBD over TLS: pvblk, nbdkit and qemu-nbd, in turns, over one file in memory, with nbdcopy as the client.

usage: tls_speed.py PVBLK [--turns N] [--mib N] [--json FILE]

Each way copies the file out and into the file, over TCP on loopback with certificates on both sides. `clear` is pvblk without TLS: the price of TLS is the
difference. `sleeps` is pvblk with workers that never poll. `again` is nbdkit a second time. The ratios are CPU to CPU: less is better.
"""

import argparse
import json
import os
import statistics
import tempfile

from pairs import Server, cpu_seconds, run, timed

PORT = 13480


def certificates(folder):
    """An authority, a server `localhost`, and a client, all in one folder with the names that all programs look for."""
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-x509", "-days", "2"]
    run(new + ["-subj", "/CN=authority", "-keyout", f"{folder}/ca-key.pem", "-out", f"{folder}/ca-cert.pem"])
    by = ["-CA", f"{folder}/ca-cert.pem", "-CAkey", f"{folder}/ca-key.pem", "-addext", "basicConstraints=CA:FALSE"]
    for who, more in (("server", ["-addext", "subjectAltName=DNS:localhost"]), ("client", [])):
        name = "localhost" if who == "server" else "client"
        run(new + by + ["-subj", f"/CN={name}"] + more + ["-keyout", f"{folder}/{who}-key.pem", "-out", f"{folder}/{who}-cert.pem"])


def listens(port):
    with open("/proc/net/tcp") as f:
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in f.readlines()[1:])


class Ways:
    def __init__(self, pvblk, folder, mib):
        self.folder, self.mib, self.port = folder, mib, PORT
        self.file = f"{folder}/disk"
        run(["dd", "if=/dev/urandom", f"of={self.file}", "bs=1M", f"count={mib}"])
        run(["cp", self.file, f"{folder}/image"])
        certificates(folder)
        tls = f"tls={folder}"
        self.commands = {
            "nbdkit": lambda p: ["nbdkit", "-f", "--tls=require", f"--tls-certificates={folder}", "--tls-verify-peer", "-p", p, "-i", "127.0.0.1", "file", self.file],
            "qemu-nbd": lambda p: ["qemu-nbd", "--persistent", "--shared=8", "--object", f"tls-creds-x509,id=t,endpoint=server,verify-peer=yes,dir={folder}", "--tls-creds", "t",
                                   "-f", "raw", "-b", "127.0.0.1", "-p", p, "-x", "disk", self.file],
            "pvblk": lambda p: [pvblk, "serve", "--control", "none", "--disk", f"disk={self.file}", "--nbd", f"tcp:127.0.0.1:{p},{tls}"],
            "sleeps": lambda p: [pvblk, "serve", "--control", "none", "--spin-us", "0", "--disk", f"disk={self.file}", "--nbd", f"tcp:127.0.0.1:{p},{tls}"],
            "clear": lambda p: [pvblk, "serve", "--control", "none", "--disk", f"disk={self.file}", "--nbd", f"tcp:127.0.0.1:{p}"],
        }
        self.commands["again"] = self.commands["nbdkit"]

    def measure(self, way, direction):
        """Nanoseconds of the server's CPU for each KiB, and MiB a second."""
        self.port += 1
        port = self.port
        server = Server(self.commands[way](str(port)), f"{self.folder}/{way}", lambda: listens(port))
        scheme, more = ("nbd", "") if way == "clear" else ("nbds", f"?tls-certificates={self.folder}")
        uri = f"{scheme}://localhost:{port}/disk{more}"
        ends = [uri, "null:"] if direction == "out" else [f"{self.folder}/image", uri]
        before = cpu_seconds(server.pid)
        _, _, took = timed(["nbdcopy", "--connections=1", "--requests=16", "--request-size=262144"] + ends)
        busy = cpu_seconds(server.pid) - before
        server.end()
        return busy * 1e9 / (self.mib * 1024), self.mib / took


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pvblk")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json")
    options = parser.parse_args()
    samples = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pvblk-tls-") as folder:
        os.chmod(folder, 0o755)
        ways = Ways(os.path.realpath(options.pvblk), folder, options.mib)
        names = list(ways.commands)
        for turn in range(options.turns):
            for direction in ("out", "in"):
                for name in names[turn % len(names):] + names[:turn % len(names)]:
                    samples.setdefault(direction, {}).setdefault(name, []).append(ways.measure(name, direction))
    for direction, of in samples.items():
        base = of["nbdkit"]
        median = statistics.median(cpu for cpu, _ in base)
        print(f"copy {direction}: nbdkit {median:.0f} ns of CPU a KiB, {statistics.median(r for _, r in base):,.0f} MiB/s")
        for name, got in of.items():
            if name == "nbdkit":
                continue
            ratios = [cpu / b for (cpu, _), (b, _) in zip(got, base)]
            rate = statistics.median(r for _, r in got)
            print(f"  {name:10} {statistics.median(ratios):6.3f} x ({min(ratios):.3f} to {max(ratios):.3f}), {rate:,.0f} MiB/s")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(samples, f, indent=1)


main()
