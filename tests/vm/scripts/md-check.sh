#!/bin/bash
# For uml.sh or guest.sh: assembles the disks, which are one RAID-5 array or all but one of its members, with the kernel's md. Leaves
# `mismatches` (what md's check found; nothing while degraded), `sum` (sha256 of what it holds) and `detail`.
set -euo pipefail
modprobe md-mod
modprobe raid456
mdadm --assemble --run --quiet /dev/md0 "$@"
mdadm --detail /dev/md0 >/out/detail
mdadm --wait /dev/md0 || true
if [ "$(cat /sys/block/md0/md/degraded)" = 0 ]; then
    echo check >/sys/block/md0/md/sync_action
    mdadm --wait /dev/md0 || true
    cat /sys/block/md0/md/mismatch_cnt >/out/mismatches
fi
sha256sum </dev/md0 >/out/sum
mdadm --stop --quiet /dev/md0
sync
