#!/bin/bash
# A vhost-user disk under a real driver: queues, data that fio verifies, discards, ext4 with fstrim, remount and fsck. The
# test reads the last lines.
set -euo pipefail
disk=$1
name=${disk##*/}
sys=/sys/block/$name
queues=$(ls "$sys/mq" | wc -l)
echo "queues $queues"
echo "serial $(cat "$sys/serial")"
echo "sectors $(cat "$sys/size")"
echo "cache $(cat "$sys/queue/write_cache")"
echo "discard $(cat "$sys/queue/discard_max_bytes") $(cat "$sys/queue/discard_granularity")"
echo "zeroes $(cat "$sys/queue/write_zeroes_max_bytes")"
fio --name=verify --filename="$disk" --direct=1 --ioengine=libaio --rw=randrw --bsrange=512-64k --blockalign=512 \
    --iodepth=16 --numjobs="$queues" --size=8M --offset_increment=8M --verify=crc32c --verify_fatal=1 --fsync=64 \
    --group_reporting --minimal >/dev/null
echo 'fio verified'
# A discarded or zeroed range reads as zeros here: the volume punches holes.
dd if=/dev/urandom of="$disk" bs=1M count=2 oflag=direct conv=fsync 2>/dev/null
blkdiscard -o 0 -l 1048576 "$disk"
blkdiscard -z -o 1048576 -l 524288 "$disk"
dd if="$disk" bs=512 count=3072 iflag=direct 2>/dev/null | cmp -n 1572864 - /dev/zero
if dd if="$disk" bs=512 skip=3072 count=1024 iflag=direct 2>/dev/null | cmp -s -n 524288 - /dev/zero; then exit 1; fi
echo 'discarded and zeroed'
mkfs.ext4 -q -E nodiscard "$disk"
modprobe ext4
mkdir -p /mnt
mount -t ext4 -o errors=panic "$disk" /mnt
for i in 1 2 3 4; do dd if=/dev/urandom of="/mnt/$i" bs=256k count=8 2>/dev/null; done
(cd /mnt && sha256sum 1 2 3 4 >/tmp/sums)
rm /mnt/1
sed -i 1d /tmp/sums
sync
fstrim -v /mnt
umount /mnt
e2fsck -f -n "$disk"
mount -t ext4 "$disk" /mnt
(cd /mnt && sha256sum -c /tmp/sums)
umount /mnt
echo 'all well'
