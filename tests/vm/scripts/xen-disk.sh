#!/bin/bash
# For xen.sh, in dom0: our server, /add/pvblk, and stock Linux guests. Every step says `passed STEP`, or the script ends. With a file
# /add/full there are a second guest, an array, a look at latencies, guests that are saved and restored, and a driver domain, too.
set -Eeuo pipefail
# shellcheck disable=SC1091
source /lib/xen-lab.sh
trap 'script_failed /out/serve.log' ERR

step() { echo "passed $* (at $(cut -d ' ' -f 1 /proc/uptime) s)"; }

pvblk() { /add/pvblk "$@"; }

serve() {
    : >/out/serve.log
    /add/pvblk serve --xen --control unix:/run/control --disk a=file:/run/a.img --disk b=file:/run/b.img \
        --disk 'r=raid5:[fault:seed=1:file:/run/m0][file:/run/m1][file:/run/m2],stripes=256' "$@" 2>>/out/serve.log &
    server=$!
    until grep -q '^pvblk: ready' /out/serve.log; do
        kill -0 "$server"
        sleep 0.2
    done
}

stop() {
    kill "$server"
    wait "$server"
}

# A guest's work on its disk $1: a file system, checked data, discard, flush, and a check of all of it afterwards. $2 jobs.
load() {
    cat <<END
set -euo pipefail
await_disk $1
echo "queues of $1: \$(queues_of $1)"
mkfs.ext4 -q /dev/$1
mount -t ext4 -o discard /dev/$1 /mnt
fio --name=v --directory=/mnt --rw=randrw --bsrange=512-128k --size=3M --numjobs=$2 --iodepth=16 --ioengine=libaio --direct=1 \
    --verify=crc32c --verify_fatal=1 --fsync=32 --group_reporting --output-format=terse >/tmp/terse
dd if=/dev/urandom of=/mnt/kept bs=64k count=32 conv=fsync status=none
sha256sum /mnt/kept >/tmp/sum
rm -f /mnt/v.*
fstrim -v /mnt
umount /mnt
mount -t ext4 /dev/$1 /mnt
sha256sum -c /tmp/sum
umount /mnt
e2fsck -fn /dev/$1
END
}

pvblk --version
truncate -s 64M /run/a.img
truncate -s 48M /run/b.img
for m in m0 m1 m2; do truncate -s 40M "/run/$m"; done
pvblk raid create --name r --level 5 --raid-devices 3 /run/m0 /run/m1 /run/m2
serve
guest_create one - 4 384 xen_blkfront.max_ring_page_order=3
[ ! -e /add/full ] || guest_create two - 1 256 'xen_blkfront.max_queues=1 xen_blkfront.max_ring_page_order=0 xen_blkfront.feature_persistent=N'

guest_says one 300 '^init:'
pvblk xen attach a one xvda | tee /tmp/attached
grep -q '4 queues of 8 pages, grants persistent' /tmp/attached
pvblk xen list
xenstore-ls -f /local/domain/0/backend/pvblk
xenstore-ls -f "/local/domain/$(guest_domid one)/device/vbd" | grep -v ring-ref
step 'a guest with 4 CPUs has 4 queues of 8 pages'

guest_run one 400 "$(load xvda "$([ -e /add/full ] && echo 8 || echo 4)")"
step 'ext4, checked data, fstrim, remount and e2fsck with persistent grants'

truncate -s 80M /run/a.img
kill -HUP "$server"
guest_run one 60 'until [ "$(cat /sys/block/xvda/size)" = 163840 ]; do sleep 0.2; done'
step 'a guest sees its disk grow'

# True if all hops of the guest's requests are told, and four of five requests at least were found below: a clock that stands still hides some.
tells_apart() {
    local hop found missed
    for hop in 'a/guest: waits' 'a/guest: down to ring' 'a/back: waits' 'a/file:/run/a.img: works' 'a/guest: up from ring'; do
        grep -q "^| $hop " /out/latency-guest || { echo "no hop $hop"; return 1; }
    done
    read -r found missed < <(sed -nE 's/^the path of requests to a.guest: ([0-9]+) of [^,]*(, and ([0-9]+) without events below)?$/\1 \3/p' /out/latency-guest)
    echo "requests found below: $found, not found: ${missed:-0}"
    [ "$found" -ge $((${missed:-0} * 4)) ]
}

# Under emulation dom0's clock is set, or stands still, now and then. A capture in which it did says so, or lacks requests, and is made again.
for try in {1..25}; do
    rm -rf /tmp/guest /tmp/server.blktrace.*
    /add/pvblk trace unix:/run/control --output /tmp/server &
    tracer=$!
    guest_run one 120 'trace_disk xvda 3 --rw=randrw --bs=4k --iodepth=4'
    kill -INT "$tracer"
    wait "$tracer"
    mkdir /tmp/guest
    tar -xf /run/a.img -C /tmp/guest
    if pvblk latency /tmp/server --guest a=/tmp/guest/xvda >/out/latency-guest && tells_apart; then break; fi
    [ "$try" -lt 25 ]
done
sed -n -e '/^note/p' -e '/^the path/,$p' /out/latency-guest
step 'latency of guest, ring, back end and volume apart'

two_guests() {
    guest_says two 300 '^init:'
    pvblk xen attach b two xvdb | tee /tmp/attached
    grep -q '1 queues of 1 pages, grants copied' /tmp/attached
    guest_run two 400 "$(load xvdb 2)"
    step 'the same with one queue of one page, and copied grants'

    pvblk xen attach r two xvdc
    guest_run one 300 "$(load xvda 2)" &
    loading=$!
    guest_run two 400 'set -e; await_disk xvdc
    fio --name=v --filename=/dev/xvdc --rw=randwrite --bsrange=4k-64k --size=12M --iodepth=8 --ioengine=libaio --direct=1 --verify=crc32c \
        --do_verify=0 --output-format=terse >/tmp/terse'
    pvblk raid fail --control unix:/run/control r 0
    guest_run two 400 'fio --name=v --filename=/dev/xvdc --rw=randwrite --bsrange=4k-64k --size=12M --iodepth=8 --ioengine=libaio --direct=1 \
        --verify=crc32c --verify_fatal=1 --output-format=terse >/tmp/terse'
    pvblk raid detail --control unix:/run/control r | grep -i -e state -e degraded
    wait "$loading"
    step 'two guests at once, and a member of an array lost under one of them'

    guest_run one 120 'fio --name=l --filename=/dev/xvda --rw=randread --bs=4k --runtime=15 --time_based --iodepth=8 --ioengine=libaio --direct=1 \
        --output-format=terse >/tmp/terse' &
    loading=$!
    sleep 6
    pvblk latency --live unix:/run/control --seconds 5 >/out/latency
    cat /out/latency
    wait "$loading"
    step 'latency of a guest, hop by hop'

    pvblk xen detach two xvdc
    pvblk xen detach two xvdb
    guest_run two 60 'await_no_disk xvdb; await_no_disk xvdc'
    guest_destroy two
    step 'detached from a guest that stays'
}
[ ! -e /add/full ] || two_guests

pvblk xen detach one xvda
guest_run one 60 'await_no_disk xvda'
step 'detached, and gone in the guest'

pvblk xen attach a one xvda
guest_run one 60 'await_disk xvda; dd if=/dev/xvda of=/dev/null bs=64k count=4 iflag=direct status=none'
stop
serve --no-persistent-grants
pvblk xen detach one xvda
guest_run one 60 'await_no_disk xvda'
pvblk xen attach a one xvda | tee /tmp/attached
grep -q 'grants copied' /tmp/attached
guest_run one 400 "$(load xvda 2)"
step 'stopped, started and used again, with copied grants'

stop
serve --no-persistent-grants --xen-attach a=one:xvda
guest_run one 60 'await_disk xvda; dd if=/dev/xvda of=/dev/null bs=64k count=16 iflag=direct status=none'
step 'a disk by name is back after its server'

guest_run one 60 'await_disk xvda; fio --name=l --filename=/dev/xvda --rw=randwrite --bs=16k --runtime=60 --time_based --iodepth=16 \
    --ioengine=libaio --direct=1 --output-format=terse >/tmp/terse' >/dev/null &
loading=$!
sleep 8
left=/local/domain/0/backend/pvblk/$(guest_domid one)/51712
guest_destroy one
wait "$loading" || true
while xenstore-exists "$left"; do sleep 0.5; done
pvblk xen list
guest_on_reboot=restart guest_create one - 2 224 xen_blkfront.max_ring_page_order=2
guest_run one 300 'await_disk xvda; dd if=/dev/xvda of=/dev/null bs=64k count=16 iflag=direct status=none'
step 'a guest destroyed under load, and started again'

guest_run one 100 'set -e; mkfs.ext4 -q /dev/xvda; mount -t ext4 /dev/xvda /mnt
    dd if=/dev/urandom of=/mnt/kept bs=64k count=32 conv=fsync status=none; sha256sum /mnt/kept >/mnt/sum'
guest_reboot one 200
guest_run one 300 'set -e; await_disk xvda; mount -t ext4 /dev/xvda /mnt; sha256sum -c /mnt/sum'
step 'a guest that reboots has its disk again, by name'

# Data that is checked, for so many seconds, on the disk that is mounted.
checked() {
    echo "fio --name=v --directory=/mnt --rw=randrw --bsrange=4k-64k --size=3M --numjobs=2 --iodepth=8 --ioengine=libaio --direct=1 \
        --time_based --runtime=$1 --verify=crc32c --verify_fatal=1 --output-format=terse >/tmp/terse"
}

saved_and_restored() {
    guest_begin one "$(checked 10)"
    sleep 3
    xl save -c one /run/saved
    rm /run/saved
    guest_end one 200
    step 'a guest is saved under load, and goes on'

    guest_begin one "$(checked 10)"
    sleep 3
    xl save one /run/saved
    xl restore /run/saved
    guest_renew one 60
    guest_end one 200
    guest_run one 60 'sha256sum -c /mnt/sum; [ "$(queues_of xvda)" = 2 ]'
    step 'saved under load, and restored'

    # By hand: without --xen-attach, a guest must not run before it has its disk.
    guest_begin one "$(checked 10)"
    sleep 3
    xl save one /run/saved
    stop
    serve
    xl restore -p /run/saved
    rm /run/saved
    guest_renew one 60
    pvblk xen attach --no-wait a one xvda
    xl unpause one
    guest_end one 200
    guest_run one 60 'sha256sum -c /mnt/sum; umount /mnt; e2fsck -fn /dev/xvda'
    step 'restored, and attached by hand before it runs'
}

driver_domain() {
    local domain
    guest_add=/add/pvblk guest_more='driver_domain = 1' guest_create driver - 2 256
    domain=$(guest_domid driver)
    guest_create two - 2 192 xen_blkfront.max_ring_page_order=2
    guest_run driver 200 'for m in xen-evtchn xen-gntdev; do modprobe $m; done
        if /add/pvblk serve --xen --disk d=mem:32M --xen-attach d=two 2>/tmp/log; then exit 1; fi
        tail -n 1 /tmp/log; grep -q "attach disks to guests by name" /tmp/log
        /add/pvblk serve --xen --disk d=mem:32M 2>/tmp/log & until grep -q "^pvblk: ready" /tmp/log; do kill -0 $!; sleep 0.2; done'
    guest_says two 300 '^init:'
    pvblk xen attach d two xvda --back-end "$domain"
    guest_run two 200 "set -e; await_disk xvda; mkfs.ext4 -q /dev/xvda; mount -t ext4 /dev/xvda /mnt; $(checked 4)"
    guest_destroy two
    # The driver domain's server removes the nodes that only it can see.
    while xenstore-exists "/local/domain/$domain/backend/pvblk/$(guest_domid two)"; do sleep 0.5; done
    guest_run driver 20 'cat /tmp/log'
    guest_destroy driver
    step 'a driver domain serves another guest'
}
[ ! -e /add/full ] || saved_and_restored
guest_destroy one
stop
[ ! -e /add/full ] || driver_domain
step 'the server stops in order'
