"""The frame of scripts that measure several ways to one disk in turns: loads, processes with their CPU time, ratios, raw samples.

In each turn every way runs once for a load, in an order that rotates. Ratios are made within a turn; the median over the turns is told, with the
least and the greatest. One way is there twice: its ratio to itself says how exact the others are.
"""

import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TICK = os.sysconf("SC_CLK_TCK")
# Longest time of a command in seconds, beyond the seconds for which a load is to run.
LONGEST = 300


def run(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=2 * LONGEST, **more)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def until(what, ready, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            sys.exit(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def timed(command, seconds=0):
    """What a command says, its CPU time in seconds, that of its children included, and its time."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as told:
        begin = time.monotonic()
        child = subprocess.Popen(command, stdout=said, stderr=told)
        alarm = threading.Timer(LONGEST + seconds, child.kill)
        alarm.start()
        _, status, used = os.wait4(child.pid, 0)
        took = time.monotonic() - begin
        alarm.cancel()
        child.returncode = status
        if status:
            told.seek(0)
            sys.exit(f"{' '.join(command)}: status {status}: {told.read()}")
        said.seek(0)
        return said.read(), used.ru_utime + used.ru_stime, took


def accepts(path):
    """Whether a process listens at this Unix socket."""
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(path) == 0


class Server:
    """A process that serves until `end`. `ready` says whether its clients may come; without it, `pvblk serve` says so itself."""

    def __init__(self, command, log, ready=None):
        self.log = f"{log}.log"
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.pid, gone = self.process.pid, lambda: self.process.poll() is not None
        until(f"{' '.join(command)} serves", lambda: gone() or (ready() if ready else "pvblk: ready" in self.said()))
        if gone():
            sys.exit(f"{' '.join(command)}: {self.said()}")

    def said(self):
        with open(self.log) as f:
            return f.read()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Load:
    def __init__(self, options, rw, size, depth, region="100%"):
        self.rw, self.size, self.depth, self.region, self.seconds = rw, size, depth, region, options.seconds
        self.options = [f"--rw={rw}", f"--bs={size}", f"--iodepth={depth}", f"--runtime={self.seconds}", f"--size={region}"]

    def __str__(self):
        return f"{self.rw} {self.size} at {self.depth}"


def rates(said):
    """Requests a second of the last job, and their number."""
    job = json.loads(said)["jobs"][-1]
    return sum(job[way]["iops"] for way in ("read", "write")), sum(job[way]["total_ios"] for way in ("read", "write"))


def measured(load, command, said=None, pid=None):
    """Requests a second, and the seconds of CPU for each: of the process `pid`, else of the command. Its JSON is in the file `said`, else on its output."""
    before = cpu_seconds(pid) if pid else 0
    text, busy, _ = timed(command, load.seconds)
    if pid:
        busy = cpu_seconds(pid) - before
    if said:
        with open(said) as f:
            text = f.read()
    iops, count = rates(text[text.index("{"):])
    return iops, busy / max(count, 1)


def fio(load, engine, pid=None):
    command = ["fio", "--name=speed", "--output-format=json", "--norandommap", "--randrepeat=0", "--time_based"]
    return measured(load, command + engine + load.options, pid=pid)


def bench(program, folder, load, target, pid=None, spin=0):
    said = f"{folder}/bench.json"
    return measured(load, [program, "bench", "--target", target, "--spin-us", str(spin), "--json", said] + load.options, said, pid)


def turns(options, load, ways):
    """For each way, its rates and CPU times, turn by turn."""
    found = {name: [] for name in ways}
    names = list(ways)
    for turn in range(options.turns):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            found[name].append(ways[name](load))
    return found


class Report:
    """Tells ratios, and keeps the raw samples in a file, which is whole after each load."""

    def __init__(self, path, programs):
        self.path = path
        with open("/proc/cpuinfo") as f:
            models = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
        versions = {name: run(command).splitlines()[0] for name, command in programs.items()}
        machine = {"cpu": models[0] if models else platform.machine(), "cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()}
        self.all = {"command": sys.argv, "machine": machine, "versions": versions, "pinned": False, "samples": []}

    def tell(self, load, found, base, names=None, unit="/s"):
        """Ratios of the named ways, else of all, to `base`."""
        print(f"{load}: {base} {statistics.median(r for r, _ in found[base]):,.0f}{unit}, CPU {self.cpu(found[base]):.1f} us", flush=True)
        for name in names or found:
            if name != base:
                ratios = [mine[0] / theirs[0] for mine, theirs in zip(found[name], found[base])]
                text = f"{statistics.median(ratios):7.3f} x ({min(ratios):.3f} to {max(ratios):.3f})"
                print(f"  {name:16} {text}, CPU {self.cpu(found[name]):.1f} us", flush=True)

    @staticmethod
    def cpu(values):
        return statistics.median(c for _, c in values) * 1e6

    def keep(self, load, found, **more):
        ways = {name: {"rates": [r for r, _ in values], "cpu_us": [c * 1e6 for _, c in values]} for name, values in found.items()}
        self.all["samples"].append({"load": str(load), **more, "ways": ways})
        if self.path:
            with open(f"{self.path}.new", "w") as f:
                json.dump(self.all, f, indent=1)
            os.replace(f"{self.path}.new", self.path)


def arguments(parser, turns, seconds):
    parser.add_argument("pvblk")
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--seconds", type=int, default=seconds)
    parser.add_argument("--sizes", default="4k,128k")
    parser.add_argument("--depths", default="1,16,64")
    parser.add_argument("--rw", default="randread,randwrite")
    parser.add_argument("--json")


def announce(options, runs, more=0):
    """Says how long so many runs of each turn take at least."""
    minutes = (options.turns * runs * (options.seconds + 0.3) + more) / 60
    print(f"{options.turns} turns of {runs} runs of {options.seconds} s: {minutes:.0f} minutes", flush=True)
