#!/bin/bash
# For uml.sh or guest.sh with 15 disks of 24 MiB or more: RAID-5 arrays of the kernel's md for another program to take over.
#
#   1 to 4    an array that another program made, with zeros in it
#   5 to 8    room for one with a partial parity log; left-symmetric
#   9 to 11   room for one with a bitmap; right-symmetric
#   12 to 15  room for copies of 5 to 8 in the middle of writes
#
# Each array is filled and stopped. Leaves `mismatches.other` (what md's check found in the first array as it came),
# `sum.other`, `sum.ppl` and `sum.bitmap` (sha256 of what they hold), `tail.cut` (sha256 of the second half of 5 to 8 when the
# copies were made; all writes were in the first), `detail.*` and `kernel`.
set -euo pipefail
uname -r >/out/kernel
modprobe md-mod
modprobe raid456
seq -w 1 1500000 >/tmp/data

# The first 12 MB get numbered lines, and parts of stripes are changed after.
fill() {
    dd if=/tmp/data of="$1" bs=1M conv=fsync status=none
    dd if=/dev/urandom of="$1" bs=4k seek=5 count=3 conv=fsync,notrunc status=none
    dd if=/dev/urandom of="$1" bs=512 seek=20001 count=5 conv=fsync,notrunc status=none
}

finish() {
    mdadm --wait "$1" || true
    echo 3 >/proc/sys/vm/drop_caches
    sha256sum <"$1" >"/out/sum.$2"
    mdadm --detail "$1" >"/out/detail.$2"
    mdadm --stop --quiet "$1"
}

other=("${@:1:4}") ppl=("${@:5:4}") bitmap=("${@:9:3}") copies=("${@:12:4}")

mdadm --assemble --quiet /dev/md0 "${other[@]}"
mdadm --wait /dev/md0 || true
echo check >/sys/block/md0/md/sync_action
mdadm --wait /dev/md0 || true
cat /sys/block/md0/md/mismatch_cnt >/out/mismatches.other
fill /dev/md0
finish /dev/md0 other

mdadm --create /dev/md1 --run --quiet --level=5 --raid-devices=3 --metadata=1.2 --chunk=16 --bitmap=internal \
    --layout=right-symmetric --name=bitmap "${bitmap[@]}"
mdadm --wait /dev/md1 || true
fill /dev/md1
finish /dev/md1 bitmap

# Through a layer that can be stopped all at once, as a power cut would.
members=()
for disk in "${ppl[@]}"; do
    name=m${#members[@]}
    dmsetup create "$name" --table "0 $(blockdev --getsz "$disk") linear $disk 0"
    # Without udev nobody makes names below /dev/mapper.
    members+=("/dev/dm-$(dmsetup info -c --noheadings -o minor "$name")")
done
mdadm --create /dev/md2 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 --consistency-policy=ppl \
    --assume-clean --name=ppl "${members[@]}"
fill /dev/md2
half=$(($(blockdev --getsize64 /dev/md2) / 2))
sync
fio --name=writes --filename=/dev/md2 --rw=randwrite --bsrange=4k-48k --size=$half --direct=1 --ioengine=psync \
    --numjobs=4 --thread --time_based --runtime=60 >/tmp/fio.log 2>&1 &
writer=$!
sleep 2
for name in m0 m1 m2 m3; do dmsetup suspend --nolockfs --noflush "$name"; done
for n in 0 1 2 3; do dd if="${ppl[n]}" of="${copies[n]}" bs=1M conv=fsync status=none; done
for name in m0 m1 m2 m3; do dmsetup resume "$name"; done
kill "$writer"
wait "$writer" || true
echo 3 >/proc/sys/vm/drop_caches
tail -c "$half" /dev/md2 | sha256sum >/out/tail.cut
finish /dev/md2 ppl
for name in m0 m1 m2 m3; do dmsetup remove "$name"; done
sync
