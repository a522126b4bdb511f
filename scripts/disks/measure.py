#!/usr/bin/env python3
"""Disks that come and go: the price for a neighbour, and the price of many.

usage: measure.py PVBLK [--rounds N] [--seconds N] [--churn N] [--rate N] [--many N] [--json FILE]

churn: one disk runs fio (random writes of 4 KiB with verify=crc32c, 32 in flight, NBD) while others are added and removed in a row, at least
  --churn of them in each run, as fast as the server answers or --rate of them in a second. Rounds are A, B, A: quiet, beside the churn, quiet again; A/A says what is noise.
many: so many disks at once, sparse files, or memory where the limit of descriptors (two for each file) is too low: time to add them all over one connection, private memory, descriptors, threads, CPU at rest, the time of
  `disk.list` over all pages, and the time to remove all.
"""

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import tempfile
import threading
import time


class Client:
    """One connection to the control socket."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.lines, self.last = self.socket.makefile(), 0

    def send(self, method, **params):
        self.last += 1
        request = {"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def receive(self):
        response = json.loads(self.lines.readline())
        if "error" in response:
            raise RuntimeError(response["error"]["message"])
        return response["result"]

    def call(self, method, **params):
        self.send(method, **params)
        return self.receive()


class Server:
    def __init__(self, program, folder, *args):
        self.folder = folder
        command = [program, "serve", "--control", f"unix:{folder}/ctl", "--nbd", f"unix:{folder}/nbd", *args]
        self.log = open(f"{folder}/log", "w+")
        self.process = subprocess.Popen(command, stderr=self.log)
        until = time.monotonic() + 60
        while "pvblk: ready" not in open(f"{folder}/log").read():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(open(f"{folder}/log").read())
            time.sleep(0.01)

    def client(self):
        return Client(f"{self.folder}/ctl")

    def counts(self):
        pid = self.process.pid
        status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
        return {
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "private_kib": int(status["RssAnon"].split()[0]),
        }

    def cpu_seconds(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.terminate()
        return self.process.wait(120)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def fio(folder, seconds):
    """p99 of writes in microseconds, and their number."""
    out = subprocess.run(
        ["fio", "--name=v", "--ioengine=nbd", f"--uri=nbd+unix:///v?socket={folder}/nbd", "--rw=randwrite", "--bs=4k", "--iodepth=32",
         "--verify=crc32c", "--verify_backlog=1024", "--size=64m", "--time_based", f"--runtime={seconds}", "--output-format=json"],
        capture_output=True, text=True)
    if out.returncode != 0:
        raise RuntimeError(out.stderr + out.stdout)
    write = json.loads(out.stdout[out.stdout.index("{"):])["jobs"][0]["write"]
    return {"p99_us": write["clat_ns"]["percentile"]["99.000000"] / 1000, "writes": write["total_ios"]}


class Churn(threading.Thread):
    """Adds and removes disks in a row until it is told to end."""

    def __init__(self, server, least, rate=0):
        super().__init__()
        self.server, self.least, self.rate, self.ending, self.count, self.error = server, least, rate, False, 0, None

    def run(self):
        try:
            client, begin = self.server.client(), time.monotonic()
            while not self.ending or self.count < self.least:
                volume = f"file:{self.server.folder}/churn.img" if self.count % 2 else "mem:1M"
                client.call("disk.add", name="churn", volume=volume)
                client.call("disk.remove", name="churn")
                self.count += 1
                if self.rate:
                    time.sleep(max(0, begin + self.count / self.rate - time.monotonic()))
        except Exception as e:
            self.error = e


def churn(options, folder):
    for name, mib in (("v.img", 64), ("churn.img", 16)):
        with open(f"{folder}/{name}", "wb") as f:
            f.truncate(mib << 20)
    with Server(options.pvblk, folder, "--disk", f"v=file:{folder}/v.img") as server:
        return churn_beside(options, folder, server)


def churn_beside(options, folder, server):
    # What starts once, such as threads that are kept, is there.
    warm = Churn(server, 100)
    warm.ending = True
    warm.run()
    fio(folder, 2)
    time.sleep(5)
    before, rounds = server.counts(), []
    for _ in range(options.rounds):
        a = fio(folder, options.seconds)
        beside = Churn(server, options.churn, options.rate)
        beside.start()
        b = fio(folder, options.seconds)
        beside.ending = True
        beside.join()
        if beside.error:
            raise beside.error
        rounds.append({"before": a, "beside": b, "disks": beside.count, "after": fio(folder, options.seconds)})
    time.sleep(5)
    after = server.counts()
    status = server.stop()

    def ratio(of, to):
        return statistics.median(r[of]["p99_us"] / r[to]["p99_us"] for r in rounds)

    return {"rate": options.rate, "rounds": rounds, "p99_beside_to_before": ratio("beside", "before"), "p99_after_to_before": ratio("after", "before"),
            "counts_before": before, "counts_after": after, "exit_status": status}


def many(options, folder):
    os.mkdir(f"{folder}/disks")
    for n in range(options.many):
        with open(f"{folder}/disks/{n}", "wb") as f:
            f.truncate(1 << 20)
    with Server(options.pvblk, folder) as server:
        return many_at(options, folder, server)


def many_at(options, folder, server):
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * options.many + 200
    volume = (lambda n: f"file:{folder}/disks/{n}") if files else (lambda n: "mem:1M")
    result = {"disks": options.many, "volume": volume(0), "counts_empty": server.counts()}
    client = server.client()

    def all_of(method, params):
        """Sends all requests, a hundred ahead of the answers."""
        start, ahead = time.monotonic(), 0
        for n in range(options.many):
            client.send(method, **params(n))
            ahead += 1
            if ahead == 100:
                client.receive()
                ahead -= 1
        for _ in range(ahead):
            client.receive()
        return time.monotonic() - start

    result["add_seconds"] = all_of("disk.add", lambda n: {"name": f"d{n}", "volume": volume(n)})
    time.sleep(5)
    result["counts_full"] = server.counts()
    cpu, start = server.cpu_seconds(), time.monotonic()
    time.sleep(10)
    result["idle_cpu_percent"] = 100 * (server.cpu_seconds() - cpu) / (time.monotonic() - start)
    times = []
    for _ in range(5):
        start, after, count = time.monotonic(), None, 0
        while True:
            page = client.call("disk.list", after=after)
            count += len(page["disks"])
            after = page["next"]
            if after is None:
                break
        times.append(time.monotonic() - start)
        assert count == options.many, count
    result["list_seconds"] = times
    start = time.monotonic()
    command = [options.pvblk, "disk", "list", "--control", f"unix:{folder}/ctl"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result["command_list_seconds"] = time.monotonic() - start
    result["remove_seconds"] = all_of("disk.remove", lambda n: {"name": f"d{n}"})
    time.sleep(5)
    result["counts_empty_again"] = server.counts()
    result["exit_status"] = server.stop()
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pvblk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--churn", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--only", choices=["churn", "many"])
    parser.add_argument("--json")
    options = parser.parse_args()
    # Each file takes two descriptors. Only root may lift the hard limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        most = max(hard, 4 * options.many)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, PermissionError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    version = subprocess.run([options.pvblk, "--version"], capture_output=True, text=True).stdout.strip()
    results = {"version": version, "kernel": platform.release(), "cpus": os.cpu_count(), "load_before": os.getloadavg()}
    for name, run in (("churn", churn), ("many", many)):
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(options, folder)
            print(name, json.dumps({k: v for k, v in results[name].items() if k != "rounds"}, indent=2))
    results["load_after"] = os.getloadavg()
    if options.json:
        with open(options.json, "w") as f:
            json.dump(results, f, indent=1)


main()
