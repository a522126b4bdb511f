#!/bin/bash
# Tells the host that it runs, waits for another size of the disk, and uses the new sectors.
set -euo pipefail
disk=$1
before=$(blockdev --getsize64 "$disk")
printf 'ready' | dd of="$disk" bs=512 conv=sync oflag=direct 2>/dev/null
for _ in $(seq 600); do
    now=$(blockdev --getsize64 "$disk")
    [ "$now" = "$before" ] || break
    sleep 0.1
done
echo "from $before to $now"
printf 'the end' | dd of="$disk" bs=512 seek=$((now / 512 - 1)) conv=sync oflag=direct 2>/dev/null
