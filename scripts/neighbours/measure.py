#!/usr/bin/env python3
"""How long a disk's requests take while its neighbour is attacked: p50, p99 and max of 4 KiB reads, one at a time, over NBD.

usage: measure.py PVBLK SLOW_MEDIUM [--placed] [--limit LIMITS] [--seconds N] [--rounds N] [--json FILE] [ATTACK...]

Two servers of one worker each. "alone": nobody attacks. "elsewhere": the attack hits the other server, so that it takes the same
CPU time on this machine. "beside": it hits this server. On two CPUs the clients also wait for each other; with --placed the workers have
a CPU of their own, and the neighbour's client goes before all else on the other CPU, so it waits for the server only. As root, since the slow medium is a FUSE mount.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import attacks
from peers import Nbd

# With --placed, CPUs of both servers' workers, and of all else. The neighbour's client has real-time priority there.
WORKERS, OTHERS = 1, 0
HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = [n for n, f in vars(attacks).items() if callable(f) and getattr(f, "__module__", "") == "attacks" and n != "control"]
# These attacks are on media: the neighbour is a file, and its requests are write, flush and read together.
ON_MEDIA = {"hung_file", "questions", "odd_addresses"}


class Server:
    def __init__(self, options, folder):
        self.folder, self.options = folder, options
        os.mkdir(f"{folder}/medium")
        log = open(f"{folder}/medium.log", "w")
        self.medium = subprocess.Popen([options.slow_medium, f"{folder}/medium"], stderr=log)
        until(lambda: os.path.exists(f"{folder}/medium/.control"))
        for path, size in (("medium/slow.img", 64), ("medium/direct.img", 64), ("healthy.img", 64)):
            with open(f"{folder}/{path}", "wb") as f:
                f.truncate(size << 20)
        with open(f"{folder}/fragmented.img", "wb") as f:
            f.truncate(20000 * 8192)
            for i in range(20000):
                os.pwrite(f.fileno(), b"x" * 4096, i * 8192)
        disks = {
            "neighbour": "mem:64M",
            "healthy": f"file:{folder}/healthy.img",
            "a": "mem:256M",
            "slow": f"file:{folder}/medium/slow.img",
            "direct": f"file:{folder}/medium/direct.img,direct",
            "fragmented": f"file:{folder}/fragmented.img",
        }
        command = [options.pvblk, "serve", "--workers", "1", "--max-queues", "64"]
        for name, spec in disks.items():
            command += ["--disk", f"{name}={spec}"]
        command += ["--nbd", f"unix:{folder}/nbd", "--control", f"unix:{folder}/control"]
        if options.limit:
            command += ["--limit", f"a:{options.limit}"]
        for name in ("a", "direct"):
            command += ["--vhost-user", f"{name}=unix:{folder}/{name}.vhost"]
        self.log = open(f"{folder}/log", "w")
        self.process = subprocess.Popen(command, stderr=self.log, stdout=self.log)
        until(lambda: "pvblk: ready" in open(f"{folder}/log").read())
        if options.placed:
            self.place()
        with open(f"{folder}/pid", "w") as f:
            f.write(str(self.process.pid))

    def place(self):
        """Its worker on WORKERS, all else on OTHERS."""
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/comm") as f:
                is_worker = f.read().startswith("pvblk-worker")
            os.sched_setaffinity(int(task), {WORKERS if is_worker else OTHERS})

    def attack(self, name):
        environment = dict(os.environ, PVBLK=self.options.pvblk)
        command = [sys.executable, f"{HERE}/attacks.py", name, self.folder]
        if self.options.placed:
            command = ["taskset", "-c", str(OTHERS)] + command
        return subprocess.Popen(command, env=environment, stderr=open(f"{self.folder}/attack.log", "w"))

    def heal(self):
        with open(f"{self.folder}/medium/.control", "w") as f:
            f.write("set * * now\nrelease * *\n")

    def stop(self):
        self.heal()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        finally:
            self.medium.terminate()
            self.medium.wait()
        return code


def until(condition):
    end = time.time() + 60
    while not condition():
        assert time.time() < end, "it didn't start within a minute"
        time.sleep(0.02)


def bench(options, folder):
    """Latencies in microseconds by `pvblk bench`."""
    out = f"{folder}/bench.json"
    target = f"nbd+unix:///neighbour?socket={folder}/nbd"
    command = ["taskset", "-c", str(OTHERS), "chrt", "-f", "1"] if options.placed else []
    command += [options.pvblk]
    command += ["bench", "--target", target, "--rw", "randread", "--bs", "4k", "--iodepth", "1"]
    subprocess.run(command + ["--runtime", f"{round(options.seconds * 1000)}ms", "--json", out], check=True, capture_output=True)
    latency = json.load(open(out))["jobs"][0]["read"]["clat_ns"]
    percent = latency["percentile"]
    return [percent["50.000000"] / 1e3, percent["99.000000"] / 1e3, latency["max"] / 1e3]


def turns(options, folder):
    """Write, flush and read on the healthy file, one after the other, in microseconds for the three."""
    client, times = Nbd(f"{folder}/nbd", "healthy"), []
    end = time.time() + options.seconds
    while time.time() < end:
        start = time.perf_counter()
        client.send(1, len(times) % 1000 * 4096, 4096, bytes(4096))
        assert client.simple_reply() == 0
        client.send(3, 0, 0)
        assert client.simple_reply() == 0
        client.send(0, 0, 4096)
        assert client.simple_reply(4096) == 0
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return [times[len(times) // 2], times[len(times) * 99 // 100], times[-1]]


def one(options, name):
    measure = turns if name in ON_MEDIA else bench
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
        ours, other = Server(options, here), Server(options, there)
        result = {"alone": [], "elsewhere": [], "beside": []}
        try:
            measure(options, here)  # warm
            for _ in range(options.rounds):
                for kind, server in (("alone", None), ("elsewhere", other), ("beside", ours)):
                    attacker = server and server.attack(name)
                    time.sleep(1)
                    result[kind].append(measure(options, here))
                    if attacker:
                        over = attacker.poll()
                        attacker.kill()
                        attacker.wait()
                        server.heal()
                        if over is not None:
                            result.setdefault("over", []).append(open(f"{server.folder}/attack.log").read()[-300:])
                        time.sleep(0.5)
        finally:
            result["exit"] = [ours.stop(), other.stop()]
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pvblk")
    parser.add_argument("slow_medium")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--placed", action="store_true")
    parser.add_argument("--limit", help="limits of the attacked disk, such as bw=200M")
    parser.add_argument("attack", nargs="*", metavar="ATTACK", help="of " + " ".join(NAMES))
    options = parser.parse_intermixed_args()
    results = {}
    print(f"{'attack':18} {'alone: p50  p99   max':>26} {'elsewhere':>26} {'beside (us)':>26}  p99 / alone  / elsewhere")
    for name in options.attack or NAMES:
        result = results[name] = one(options, name)
        middle = {k: [statistics.median(r[i] for r in result[k]) for i in range(3)] for k in ("alone", "elsewhere", "beside")}
        cells = " ".join("{:8.0f} {:8.0f} {:8.0f}".format(*middle[k]) for k in middle)
        p99 = {k: v[1] for k, v in middle.items()}
        note = "" if result["exit"] == [0, 0] else f" exit {result['exit']}"
        note += f" attacker ended: {result['over'][0]!r}" if "over" in result else ""
        print(f"{name:18} {cells}  {p99['beside'] / p99['alone']:8.2f} {p99['beside'] / p99['elsewhere']:8.2f}{note}", flush=True)
    if options.json:
        with open(options.json, "w") as f:
            json.dump(results, f)


main()
