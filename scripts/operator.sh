#!/bin/bash
# operator.sh PVBLK OUT: plants five problems among seven disks of one server, and writes what `pvblk top`, `pvblk latency`, and blkparse, btt and iostat
# show of them to files in OUT. For docs/results/2026-11-23-2cpu-xeon-operator.
set -euo pipefail
pvblk=$(realpath "$1")
out=$(realpath -m "$2")
mkdir -p "$out"
dir=$(mktemp -d)
cd "$dir"
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$dir"' EXIT

# vm1 and vm5 are well. The others: a slow member, a slow medium, a limit, a guest that asks seldom, a cache that is too small.
"$pvblk" raid create --raid-devices 3 file:a.img,size=64M file:b.img,size=64M file:c.img,size=64M >create.txt
"$pvblk" serve --control unix:ctl.sock --nbd unix:nbd.sock \
    --disk vm1=mem:64M --disk vm5=mem:64M \
    --disk vm2='raid5:[file:a.img][delay:5ms:file:b.img][file:c.img]' \
    --disk vm3=delay:3ms:mem:64M \
    --disk vm4=mem:64M --limit vm4:iops=500 \
    --disk vm6=mem:64M \
    --disk vm7=cache:4M:delay:1ms:mem:256M >server.txt 2>&1 &
until grep -q 'pvblk: ready' server.txt; do sleep 0.1; done

load() {
    "$pvblk" bench --target "nbd+unix:///$1?socket=nbd.sock" --rw randread --runtime 600 "${@:2}" >"load-$1.txt" 2>&1 &
}
load vm1 --iodepth 4 --option rate_iops=1000
load vm5 --iodepth 1 --option rate_iops=500
load vm2 --iodepth 4
load vm3 --iodepth 4
load vm4 --iodepth 4
load vm6 --iodepth 1 --option thinktime=10ms
load vm7 --iodepth 4
sleep 5

export LC_ALL=C.UTF-8
"$pvblk" top --count 1 --control unix:ctl.sock >"$out/top.txt"
for disk in vm2 vm3 vm4 vm6 vm7; do
    "$pvblk" top "$disk" --count 1 --control unix:ctl.sock >"$out/top-$disk.txt"
done
"$pvblk" stat 2s --count 2 --control unix:ctl.sock >"$out/stat.txt"
"$pvblk" latency --live unix:ctl.sock --seconds 3 >"$out/latency.txt"
"$pvblk" trace unix:ctl.sock --seconds 3 --output t >trace.txt
if command -v btt >btt-path.txt && command -v blkparse >>btt-path.txt; then
    blkparse -q -i t -d t.dump -O
    btt -A -i t.dump >"$out/btt.txt"
    # head ends before blkparse does.
    { blkparse -q -i t || true; } | head -n 200 >"$out/blkparse.txt"
fi
if command -v iostat >iostat-path.txt; then
    iostat -x 1 2 >"$out/iostat.txt"
fi
