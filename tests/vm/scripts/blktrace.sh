#!/bin/bash
# For guest.sh with one disk of 64 MiB or more: makes the capture in tests/e2e/data, of a disk with mq-deadline and of a
# dm-linear device on its partition; see there. Leaves real.blktrace.N and real-dm.blktrace.N, one file for each CPU.
set -euo pipefail
disk=$1
name=$(basename "$disk")

echo mq-deadline >"/sys/block/$name/queue/scheduler"
# Few tags, so that some requests wait.
echo 16 >"/sys/block/$name/queue/nr_requests"
printf 'start=2048\n' | sfdisk -q "$disk"
until [ -b "${disk}1" ]; do sleep 0.1; done
echo "0 $(($(blockdev --getsz "${disk}1") - 8)) linear ${disk}1 8" | dmsetup create stacked
dm=/dev/dm-0
mkdir /tmp/traces
blktrace -D /tmp/traces "$disk" "$dm" >/tmp/blktrace.log &
tracer=$!
# blktrace has begun when its files exist.
until [ -f "/tmp/traces/$name.blktrace.0" ] && [ -f "/tmp/traces/dm-0.blktrace.0" ]; do sleep 0.1; done
sleep 1

# Loads that run at once. Random reads and writes past the page cache, flushed now and then; small neighbours in
# batches, which merge; and a file's way through the page cache on the partition.
fio --minimal --output=/dev/null --direct=1 --ioengine=libaio --randseed=1 \
    --name=random --filename="$dm" --size=32m --rw=randrw --bsrange=4k-16k --iodepth=8 --number_ios=130 --fsync=25 --numjobs=2 \
    --name=batches --filename="$dm" --offset=32m --size=1m --rw=write --bs=4k --iodepth=16 --iodepth_batch=8 --number_ios=100 \
    --name=backwards --filename="$dm" --offset=34m --size=1m --rw=read:-8k --bs=4k --iodepth=16 --iodepth_batch=8 --number_ios=32
fio --minimal --output=/dev/null --direct=0 --ioengine=psync --randseed=1 \
    --name=buffered --filename="${disk}1" --offset=40m --size=512k --rw=write --bs=16k --end_fsync=1
blkdiscard -f -o $((50 << 20)) -l 1M "${disk}1"
blkdiscard -f -o $((52 << 20)) -l 64K "$dm"
sync

kill -INT "$tracer"
wait "$tracer" || true
cat /tmp/blktrace.log
for cpu in 0 1; do
    cp "/tmp/traces/$name.blktrace.$cpu" "/out/real.blktrace.$cpu"
    cp "/tmp/traces/dm-0.blktrace.$cpu" "/out/real-dm.blktrace.$cpu"
done
