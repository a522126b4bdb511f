#!/bin/bash
# For xen.sh: dom0 is up, guests start, and the kernel's own back end serves them; one guest alone, then two at once, then
# one that a disk is attached to while it runs; and one with QEMU's back end, with `--with qdisk`.
set -euo pipefail
# shellcheck disable=SC1091
source /lib/xen-lab.sh
up() { echo "at $(cut -d ' ' -f 1 /proc/uptime) s: $*"; }

up 'dom0 runs its script'
uname -r
xl info | grep -E '^(xen_version|total_memory|free_memory)'
xl list
ls -l /dev/xen /run/xenstored/socket
cat /proc/xen/capabilities
echo "dom0's own number: $(xenstore-read domid)"

cat >/tmp/io.sh <<'END'
#!/bin/bash
set -euo pipefail
source /lib/guest.sh
echo "domain $(xenstore-read domid), kernel $(uname -r), $(nproc) CPUs"
await_disk xvda
echo "queues: $(queues_of xvda)"
grep -H . /sys/module/xen_blkfront/parameters/*
head -c 4194304 /dev/urandom >/tmp/data
dd if=/tmp/data of=/dev/xvda bs=64k oflag=direct conv=fsync status=none
dd if=/dev/xvda of=/tmp/back bs=64k count=64 iflag=direct status=none
cmp /tmp/data /tmp/back
fio --name=verify --filename=/dev/xvda --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --size=2M \
    --verify=crc32c --output-format=terse >/dev/null
mkfs.ext4 -q /dev/xvda
mount -t ext4 /dev/xvda /mnt
cp /tmp/data /mnt/
umount /mnt
e2fsck -fn /dev/xvda
blkdiscard -f /dev/xvda
echo done
END

disk() {
    truncate -s 64M "/tmp/disk$1"
    losetup "/dev/loop$1" "/tmp/disk$1"
}
disk 0
disk 1

guest_create one /tmp/io.sh 4 384 xen_blkfront.max_queues=2 phy:/dev/loop0,xvda,w
up 'one was created'
guest_wait one 300
up 'one has ended'
guest_destroy one
up 'one is gone'
tr -d '\r' </out/one.console | tail -n 30

guest_create two /tmp/io.sh 1 256 '' phy:/dev/loop0,xvda,w
guest_create three /tmp/io.sh 4 256 '' phy:/dev/loop1,xvda,w
up 'two and three were created'
guest_wait two 300
guest_wait three 300
up 'two and three have ended'
guest_destroy two
guest_destroy three
grep -h '^queues:' /out/two.console /out/three.console

guest_create four - 2 256
up 'four was created'
guest_run four 120 'echo one; uname -r'
guest_run four 120 'exit 3' || [ $? -eq 3 ]
xl block-attach four phy:/dev/loop0,xvdb,w
guest_run four 120 'await_disk xvdb; queues_of xvdb; blkdiscard -z /dev/xvdb'
xl block-detach four xvdb
guest_run four 120 'await_no_disk xvdb'
guest_run four 120 'echo said go; await_word go' &
guest_says four 120 '^said go'
guest_tell four go 'go on'
wait $!
guest_destroy four
tr -d '\r' </out/four.console | tail -n 20
up 'four is gone'

if [ -x /usr/libexec/xen-qemu-system-i386 ]; then
    guest_create five /tmp/io.sh 4 384 '' format=raw,vdev=xvda,access=rw,backendtype=qdisk,target=/tmp/disk0
    up 'five was created'
    guest_wait five 300
    up 'five has ended'
    guest_destroy five
    grep '^queues:' /out/five.console
fi
up 'end'
