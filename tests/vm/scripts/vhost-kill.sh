#!/bin/bash
# Load while the test does something to the disk: rounds of writes that fio verifies, until the first sector says stop. With
# a second disk, that disk says it.
set -euo pipefail
disk=$1
control=${2:-$disk}
rounds=0
until [ "$(dd if="$control" bs=512 count=1 iflag=direct 2>/dev/null | head -c 4 | tr -d '\0')" = stop ]; do
    fio --name=load --filename="$disk" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --iodepth=16 --offset=1M \
        --size=4M --verify=crc32c --verify_fatal=1 --randseed=$rounds --minimal >/dev/null
    rounds=$((rounds + 1))
    # For the host: the last sector of the first MiB counts the rounds.
    printf 'round %d\n' $rounds | dd of="$control" bs=512 seek=2047 conv=sync oflag=direct 2>/dev/null
done
echo "rounds $rounds"
if dmesg | grep -E 'I/O error|blk_update_request|timed out'; then exit 1; fi
echo 'all well'
