#!/bin/bash
# For uml.sh with four disks of 64 MiB of zeros, and one that holds a tar archive: the example `raid5_prereads`, a trace for it as
# `trace`, its libraries and their loader in `lib`, and `runs`. Replays the trace to RAID-5 arrays of the kernel's md, a new one
# for each line of `runs`:
#
#   DEPTH plain           members are the disks
#   DEPTH slow MS         members take MS milliseconds longer for each request
#
# Leaves `reads`: a line of each run, with the sectors and the requests that were read from all members.
set -euo pipefail
modprobe raid456
disks=("${@:1:4}")
mkdir /tmp/tool
tar -C /tmp/tool -xf "$5"
cd /tmp/tool

layer() {
    local n
    members=("${disks[@]}")
    [ "$1" = slow ] || return 0
    modprobe dm-delay
    for n in 0 1 2 3; do
        dmsetup create "slow$n" --table "0 $(blockdev --getsz "${disks[n]}") delay ${disks[n]} 0 $2"
        # Without udev there are no names below /dev/mapper.
        members[n]=/dev/dm-$(dmsetup info -c --noheadings -o minor "slow$n")
    done
}

# Sectors and requests that the disks have read.
counted() {
    local disk
    for disk in "${disks[@]}"; do cat "/sys/block/${disk##*/}/stat"; done |
        awk '{ requests += $1; sectors += $3 } END { print sectors, requests }'
}

while read -r depth kind ms; do
    layer "$kind" "$ms"
    mdadm --create /dev/md0 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 --consistency-policy=resync \
        --bitmap=none --assume-clean "${members[@]}" </dev/null
    read -r sectors requests < <(counted)
    lib/ld-linux-x86-64.so.2 --library-path lib ./raid5_prereads trace --depth "$depth" --on file:/dev/md0,direct,nolock </dev/null
    read -r sectors_after requests_after < <(counted)
    echo "$depth $kind ${ms:-0} $((sectors_after - sectors)) $((requests_after - requests))" | tee -a /out/reads
    mdadm --stop --quiet /dev/md0
    if [ "$kind" = slow ]; then for n in 0 1 2 3; do dmsetup remove "slow$n"; done; fi
done <runs
