#!/bin/bash
# For uml.sh or guest.sh with 8 disks of 4 MiB or more: a RAID-5 array of the kernel's md with a partial parity log, cut off in the
# middle of writes.
#
#   1 to 4  room for the array: left-symmetric, chunks of 64 KiB
#   5 to 8  room for copies of its members in the middle of writes, all of the same moment
#
# Writes begin at even chunks and end before the next, so stripes have chunks that are never written. Leaves `sum` (sha256 of
# the array's data at the end, stopped in order), and `kernel`.
set -euo pipefail
uname -r >/out/kernel
modprobe md-mod
modprobe raid456
disks=("${@:1:4}") copies=("${@:5:4}")

# Through a layer that can be stopped all at once, as a power cut would.
members=()
for disk in "${disks[@]}"; do
    name=m${#members[@]}
    dmsetup create "$name" --table "0 $(blockdev --getsz "$disk") linear $disk 0"
    # Without udev there are no names below /dev/mapper.
    members+=("/dev/dm-$(dmsetup info -c --noheadings -o minor "$name")")
done
mdadm --create /dev/md0 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 --consistency-policy=ppl \
    --assume-clean --name=cut "${members[@]}"
dd if=/dev/urandom of=/dev/md0 bs=64k count=$(($(blockdev --getsize64 /dev/md0) >> 16)) conv=fsync status=none
# Stripes that are all in memory are not read before they are written, so a cut interrupts writes only.
echo 2048 >/sys/block/md0/md/stripe_cache_size
written() {
    local numbers
    read -ra numbers </sys/block/md0/stat
    echo "${numbers[4]}"
}
filled=$(written) jobs=24
fio --name=writes --filename=/dev/md0 --rw=randwrite --bsrange=4k-48k --blockalign=128k --direct=1 --ioengine=psync \
    --numjobs=$jobs --thread --time_based --runtime=600 >/tmp/fio.log 2>&1 &
writer=$!
while (($(written) < filled + 400)); do sleep 0.1; done
# The first member falls behind until each job waits for it. A job waits either for the log of a stripe whose parity is there, or
# for data, and then parity is on its member already. The odds are even, so one in 2^24 runs has no stripe with wrong parity.
dmsetup suspend --nolockfs --noflush m0
before=-1
while now=$(written) && read -r _ waiting </sys/block/md0/inflight && ((waiting < jobs || now != before)); do
    before=$now
    sleep 0.5
done
for name in m1 m2 m3; do dmsetup suspend --nolockfs --noflush "$name"; done
for n in 0 1 2 3; do dd if="${disks[n]}" of="${copies[n]}" bs=1M conv=fsync status=none; done
for name in m0 m1 m2 m3; do dmsetup resume "$name"; done
kill "$writer"
wait "$writer" || true
echo 3 >/proc/sys/vm/drop_caches
sha256sum </dev/md0 >/out/sum
mdadm --stop --quiet /dev/md0
for name in m0 m1 m2 m3; do dmsetup remove "$name"; done
sync
