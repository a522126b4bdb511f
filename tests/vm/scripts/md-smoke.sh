#!/bin/bash
# For guest.sh or uml.sh with eight disks of 32 MiB or more: RAID-5 arrays that other programs can read afterwards. The
# first four disks are one with a partial parity log, the last four one with a bitmap. Each is created, filled, read
# back and stopped. Leaves `detail.ppl`, `examine.ppl` (of its first member), `data.ppl` (sha256 of the array's data) and
# the same for `bitmap`, and `kernel`.
set -euo pipefail
uname -r >/out/kernel
modprobe md-mod
modprobe raid456

array() {
    local policy=$1 members=("${@:2}") how=(--consistency-policy=ppl) file
    if [ "$policy" = bitmap ]; then how=(--bitmap=internal); fi
    mdadm --create /dev/md0 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 "${how[@]}" \
        --name="$policy" "${members[@]}"
    # Parity is computed in the background, also with data on the array.
    mdadm --wait /dev/md0 || true
    # The first 12 MB get numbered lines, so that no two sectors are equal; the others stay as they are.
    seq -w 1 1500000 >/tmp/data
    dd if=/tmp/data of=/dev/md0 bs=1M conv=fsync status=none
    # Parts of stripes too: parity is then read and changed.
    for file in /tmp/data /dev/md0; do
        dd if=/dev/zero of="$file" bs=4k seek=5 count=3 conv=fsync,notrunc status=none
    done
    echo 3 >/proc/sys/vm/drop_caches
    cmp -n 12000000 /tmp/data /dev/md0
    sha256sum </dev/md0 >"/out/data.$policy"
    mdadm --detail /dev/md0 >"/out/detail.$policy"
    mdadm --stop --quiet /dev/md0
    mdadm --examine "${members[0]}" >"/out/examine.$policy"
    grep -q "Consistency Policy : $policy" "/out/detail.$policy"
}

array ppl "${@:1:4}"
array bitmap "${@:5:4}"
sync
