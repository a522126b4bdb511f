#!/bin/bash
# For guest.sh with four disks of 64 MiB: makes the capture behind ext4.trace in tests/e2e/data, of ext4's writes to a
# RAID-5 array of the kernel's md; see there. Leaves md0.blktrace.N, one file for each CPU.
set -euo pipefail
modprobe raid456
modprobe ext4
mdadm --create /dev/md0 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 --consistency-policy=resync \
    --assume-clean "$@"
mkdir /tmp/traces /tmp/work
blktrace -D /tmp/traces /dev/md0 >/tmp/blktrace.log &
tracer=$!
# blktrace has begun when its files exist.
until [ -f /tmp/traces/md0.blktrace.0 ]; do sleep 0.1; done
sleep 1

run_fio() { fio --minimal --output=/dev/null --directory=/tmp/work --randseed=1 "$@"; }

mkfs.ext4 -q -b 4096 /dev/md0
mount -t ext4 -o noatime,commit=2 /dev/md0 /tmp/work

# Small files, as from an archive; then some are removed and others are created.
mkdir /tmp/work/{one,two}
seq 1 400 | while read -r n; do
    head -c $((n * n % 61 * 700 + 300)) /usr/bin/busybox >"/tmp/work/one/$n"
done
cp -r /usr/lib/modules /tmp/work/two
rm -r /tmp/work/one/*5
# As a database: small random writes past the page cache, synced now and then, and a journal that is appended to.
run_fio --name=pages --filename=pages --size=16m --rw=randwrite --bsrange=4k-16k --direct=1 --ioengine=libaio --iodepth=8 \
    --fdatasync=32 --number_ios=1600 \
    --name=journal --filename=journal --size=8m --rw=write --bs=4k --ioengine=psync --fdatasync=4 --number_ios=600
# Large sequential writes, past the page cache and through it.
run_fio --name=large --filename=large --size=24m --rw=write --bs=1m --direct=1 --ioengine=libaio --iodepth=4
run_fio --name=stream --filename=stream --size=16m --rw=write --bs=64k --ioengine=psync --end_fsync=1
# Random blocks that the page cache collects and writes back.
run_fio --name=gathered --filename=pages --size=16m --rw=randwrite --bs=4k --ioengine=psync --number_ios=2500 --overwrite=1
sync
cp /tmp/work/large /tmp/work/copy
rm -r /tmp/work/two
umount /tmp/work

kill -INT "$tracer"
wait "$tracer" || true
cat /tmp/blktrace.log
cp /tmp/traces/md0.blktrace.* /out/
