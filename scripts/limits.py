#!/usr/bin/env python3
"""Limits against the rates that are measured: limits.py PVBLK [SECONDS]. Each over NBD, 16 or 64 requests in flight, on a disk of memory."""

import json
import os
import subprocess
import sys
import tempfile

# Limits, what runs, its block size and depth, and the rate that is limited: requests (r) or bytes (b) per second.
CASES = [
    ("read-iops=1k", "randread", "4k", 16, "r", 1e3),
    ("read-iops=1k", "randread", "4k", 1, "r", 1e3),
    ("write-iops=5k", "randwrite", "4k", 16, "r", 5e3),
    ("iops=20k", "randread", "4k", 64, "r", 20e3),
    ("read-bw=50M", "randread", "64k", 16, "b", 50e6),
    ("write-bw=20M", "randwrite", "128k", 16, "b", 20e6),
    ("bw=200M", "randread", "256k", 16, "b", 200e6),
    ("bw=10M", "randread", "1m", 16, "b", 10e6),
    ("connection-iops=500,burst=100ms", "randread", "4k", 16, "r", 500),
]


def measure(pvblk, seconds, limit, rw, size, depth, unit):
    with tempfile.TemporaryDirectory() as folder:
        command = [pvblk, "serve", "--workers", "1", "--disk", "a=mem:256M", "--limit", f"a:{limit}", "--nbd", f"unix:{folder}/nbd"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in server.stderr:
            if line.startswith("pvblk: ready"):
                break
        try:
            command = [pvblk, "bench", "--target", f"nbd+unix:///a?socket={folder}/nbd", "--rw", rw, "--bs", size]
            command += ["--iodepth", str(depth), "--runtime", f"{seconds}s", "--json", f"{folder}/json"]
            subprocess.run(command, check=True, capture_output=True)
            with open(f"{folder}/json") as f:
                side = json.load(f)["jobs"][0]["read" if rw.endswith("read") else "write"]
            with open(f"/proc/{server.pid}/stat") as f:
                used = sum(int(n) for n in f.read().rsplit(")", 1)[1].split()[11:13]) / os.sysconf("SC_CLK_TCK")
        finally:
            server.terminate()
            server.wait()
    rate = side["iops"] if unit == "r" else side["bw_bytes"]
    return rate, used / seconds * 100


def main():
    pvblk, seconds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10
    print(f"{'limit':34} {'load':>22} {'asked':>12} {'measured':>12} {'of it':>8} {'CPU %':>6}")
    for limit, rw, size, depth, unit, asked in CASES:
        rate, cpu = measure(pvblk, seconds, limit, rw, size, depth, unit)
        load = f"{rw} {size} x {depth}"
        print(f"{limit:34} {load:>22} {asked:12.0f} {rate:12.0f} {rate / asked * 100:7.2f}% {cpu:6.1f}", flush=True)


main()
