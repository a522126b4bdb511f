#!/bin/bash
# For xen.sh --with qdisk, in dom0: our server, the kernel's back end on a loop device and QEMU's, each on a file in memory, for the
# same guest and in turn; our server has two of them, against each other as a control. Leaves /out/samples.tsv: back end, operation, depth, round, requests a second, and, for each request,
# system calls of the back end's process, those of them that are ioctl and write (which end in hypercalls here), and events received.
set -Eeuo pipefail
# shellcheck disable=SC1091
source /lib/xen-lab.sh
trap 'script_failed /out/serve.log' ERR
rounds=6 seconds=4

mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null || true
tracing=/sys/kernel/tracing
histogram=$tracing/events/raw_syscalls/sys_enter
for disk in ours again loop qdisk; do truncate -s 64M "/run/$disk.img" && dd if=/dev/urandom of="/run/$disk.img" bs=1M count=64 conv=notrunc status=none; done
losetup --direct-io=off /dev/loop0 /run/loop.img
/add/pvblk serve --xen --no-pressure --control unix:/run/control --disk a=file:/run/ours.img --disk b=file:/run/again.img 2>/out/serve.log &
ours=$!
until grep -q '^pvblk: ready' /out/serve.log; do sleep 0.2; done
guest_create g - 2 512 xen_blkfront.max_ring_page_order=3 phy:/dev/loop0,xvdb,w \
    'format=raw,vdev=xvdc,access=rw,backendtype=qdisk,target=/run/qdisk.img'
guest_says g 300 '^init:'
/add/pvblk xen attach a g xvda
/add/pvblk xen attach b g xvdd
guest_run g 120 'await_disk xvda; await_disk xvdb; await_disk xvdc; await_disk xvdd; for d in xvda xvdb xvdc xvdd; do echo "$d: $(queues_of $d) queues"; done'
qemu=$(for p in /proc/[0-9]*; do if tr '\0' ' ' <"$p/cmdline" | grep -q '^[^ ]*qemu-system-i386 '; then echo "${p##*/}"; fi; done | head -n 1)
# Only once: it changes the kernel's code, which emulation now and then gets wrong.
echo 'hist:keys=common_pid,id:size=4096' >"$histogram/trigger"
echo "server $ours, QEMU $qemu, tracing $(ls -d "$histogram")"

# All events of one process and the kernel's back end, so far.
events() { awk -v name="$1" '$0 ~ name { for (i = 2; i <= 3; i++) n += $i } END { print n + 0 }' /proc/interrupts; }

one() {
    local back=$1 disk=$2 op=$3 depth=$4 round=$5 pids=$6 name=$7 before after total hyper tid field kib iops
    echo 'hist:keys=common_pid,id:size=4096:clear' >>"$histogram/trigger"
    before=$(events "$name")
    # Terse, version 3: kilobytes and requests a second of reads are fields 6 and 8, of writes 47 and 49.
    [ "$op" = randread ] && field=6 || field=47
    guest_run g 120 "fio --name=b --filename=/dev/$disk --rw=$op --bs=4k --iodepth=$depth --ioengine=libaio --direct=1 --norandommap \
        --runtime=$seconds --time_based --minimal --terse-version=3 >/tmp/terse
        echo \"result $back $op $depth $round \$(cut -d ';' -f $field /tmp/terse) \$(cut -d ';' -f $((field + 2)) /tmp/terse)\"" >/dev/null
    after=$(events "$name")
    local threads=' '
    [ -z "$pids" ] || for tid in /proc/$pids/task/*; do threads+="${tid##*/} "; done
    # { common_pid: 171, id: 16 } hitcount: 5
    read -r total hyper < <(awk -v threads="$threads" '/common_pid/ { gsub(/[,{}]/, " "); pid = $2; id = $4
        if (index(threads, " " pid " ")) { n += $NF; if (id == 16 || id == 1) h += $NF } } END { print n + 0, h + 0 }' "$histogram/hist")
    read -r kib iops < <(tr -d '\r' <"/out/g.console" | sed -n "s/^result $back $op $depth $round //p")
    awk -v n="$kib" -v t="$total" -v h="$hyper" -v e="$((after - before))" -v start="$back $op $depth $round $iops" \
        'BEGIN { n /= 4; printf "%s %.3f %.3f %.3f\n", start, t / n, h / n, e / n }' | tr ' ' '\t' | tee -a /out/samples.tsv
}

for round in $(seq "$rounds"); do
    for op in randread randwrite; do
        for depth in 1 32 128; do
            # The counts for a request alone are the same each time.
            [ "$depth" -gt 1 ] || [ "$round" -le 2 ] || continue
            one pvblk xvda $op $depth "$round" "$ours" 'evtchn:pvblk'
            one qdisk xvdc $op $depth "$round" "$qemu" 'evtchn:(xen-qemu|qemu)'
            one blkback xvdb $op $depth "$round" '' 'blkif-backend'
            one pvblk-again xvdd $op $depth "$round" "$ours" 'evtchn:pvblk'
        done
    done
done
grep -i -e evtchn -e blkif /proc/interrupts
guest_destroy g
kill "$ours"
wait "$ours"
