#!/usr/bin/env python3
"""CPU time of a server whose metrics are read each second, with 1,000 disks.

    scripts/scrape.py PVBLK [DISKS [SECONDS [HOPS]]]

For each line SECONDS of a server at rest, of which the first column says how many disks were used before, and how the metrics are read. The
CPU time is the server's own, user and system, all threads; 'at rest' is without a reader, and is taken away from the others. One request in HOPS is followed
(`none`, unless given), also while the server is at rest, but for the first such line.
"""
import os, socket, statistics, subprocess, sys, tempfile, time

pvblk = os.path.abspath(sys.argv[1])
disks = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
seconds = int(sys.argv[3]) if len(sys.argv) > 3 else 30
hops = "hops=" + (sys.argv[4] if len(sys.argv) > 4 else "none")
OPEN = "Accept: application/openmetrics-text;version=1.0.0\r\n"


def cpu_ns(pid):
    """CPU time of a process, of threads that live and of those that ended: the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def read(sock, path, headers=""):
    """One reading over a connection that is kept, as Prometheus does; returns its lines and bytes."""
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = sock.recv(1 << 20)
        if not piece:
            raise RuntimeError("the server ended the connection")
        data += piece
    return data.count(b"\n"), len(data)


def measure(pid, web, path, headers=""):
    """CPU percent, milliseconds a reading takes, lines, KiB."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(web)
    took, lines, size = [], 0, 0
    if path:
        read(sock, path, headers)
    begin, used = time.monotonic(), cpu_ns(pid)
    for n in range(1, seconds + 1):
        time.sleep(max(0, begin + n - time.monotonic()))
        if path:
            at = time.monotonic()
            lines, size = read(sock, path, headers)
            took.append((time.monotonic() - at) * 1e3)
    spent = cpu_ns(pid) - used
    elapsed = time.monotonic() - begin
    return spent / 1e7 / elapsed, statistics.median(took or [0]), lines, size // 1024


def use(folder, names):
    """One read and one write at least of each of these disks."""
    for name in names:
        uri = f"nbd+unix:///{name}?socket={folder}/nbd"
        for rw in ("randread", "randwrite"):
            line = [pvblk, "bench", "--target", uri, "--rw", rw, "--size", "64k", "--bs", "4k"]
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/pvblk.toml", "w") as file:
            file.write(f'nbd = ["unix:{folder}/nbd"]\nweb = "unix:{folder}/web"\ncontrol = "unix:{folder}/ctl"\n')
            file.writelines(f'[disk.vm{n:04}]\nvolume = "null:1G"\n' for n in range(disks))
        with open(f"{folder}/log", "w") as log:
            server = subprocess.Popen([pvblk, "serve", "--config", f"{folder}/pvblk.toml"], stderr=log, stdout=log)
        try:
            while "pvblk: ready" not in open(f"{folder}/log").read():
                time.sleep(0.05)
                if server.poll() is not None:
                    raise SystemExit(open(f"{folder}/log").read())
            print(f"{disks} disks, {seconds} s each, load average {os.getloadavg()[0]:.1f}")
            print(f"{'used':>5} {'read':42} {'CPU %':>7} {'ms':>7} {'lines':>7} {'KiB':>7}")
            before = 0
            for used in (0, disks // 10, disks):
                use(folder, [f"vm{n:04}" for n in range(before, used)])
                before = used
                # Clients that have left are still looked for a while.
                time.sleep(5)
                rest = measure(server.pid, f"{folder}/web", None)[0]
                print(f"{used:5} {'at rest':42} {rest:7.3f}", flush=True)
                for path, headers in ((f"/metrics?{hops}", ""), (f"/metrics?{hops}", OPEN), (f"/metrics?buckets=all&{hops}", ""), (f"/metrics?buckets=none&{hops}", "")):
                    percent, took, lines, size = measure(server.pid, f"{folder}/web", path, headers)
                    name = path + (" (OpenMetrics)" if headers else "")
                    print(f"{used:5} {name:42} {percent - rest:7.3f} {took:7.1f} {lines:7} {size:7}", flush=True)
        finally:
            server.terminate()
            server.wait()


main()
