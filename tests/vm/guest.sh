#!/usr/bin/env bash
# Runs a script as root in a plain Linux guest under QEMU, in software: slow, but it works everywhere.
#
#   tests/vm/guest.sh --script FILE --out DIR [--add FILE]... [--disk IMG]... [--memory MB] [--seconds N]
#       [--vhost SOCKET]... [--queues N] [--cpus N]
#
# Disks at vhost-user sockets come after the others, each with N queues (1); there are 2 CPUs, and a queue for each at most. The guest waits
# for a server that goes away.
#
# FILE is a script for bash or busybox' sh; its arguments are the disks' paths, /dev/vda and so on. Files that it leaves in /out
# come back in DIR, and its output is in DIR/log. Added files are in /add. Programs: see make_initramfs in lib.sh; statuses: there too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
arguments "$@"
((dom0_mb == 0)) && [ -z "$with" ] || usage '--dom0-memory and --with are for xen.sh'
for program in qemu-system-x86_64 readelf sha256sum timeout; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done

make_image() {
    unpack_kernel "$1/kernel"
    make_initramfs "$1/initramfs" "$modules"
}

cached_image guest
prepare_run

letters=abcdefghijklmnop
names=() drives=()
add() {
    local name=d${#names[@]} kind=$1 file=$2
    names+=("/dev/vd${letters:${#names[@]}:1}")
    if [ "$kind" = vhost ]; then
        drives+=(-chardev "socket,id=$name,path=${file//,/,,},reconnect=1"
            -device "vhost-user-blk-pci,chardev=$name,num-queues=$queues")
        return
    fi
    # Commas separate QEMU's words; two stand for one.
    drives+=(-drive "file=${file//,/,,},format=raw,if=none,id=$name,cache=unsafe,discard=unmap"
        -device "virtio-blk-pci,drive=$name")
}
for file in "${disks[@]}"; do add file "$file"; done
for file in "${vhosts[@]}"; do add vhost "$file"; done
add file "$run/out"
result=${names[-1]}
unset 'names[-1]'
status=0
# One thread for all CPUs: with several, a CPU may run a stale translation of code that another has just patched, and the guest's kernel panics
# while it boots (seen with four CPUs on a loaded machine).
limited qemu-system-x86_64 -machine q35,memory-backend=ram -accel tcg,thread=single -cpu max -smp "$cpus" -m "$memory_mb" \
    -object "memory-backend-memfd,id=ram,size=${memory_mb}M,share=on" \
    -display none -monitor none -serial "file:$run/console" -no-reboot -nic none "${drives[@]}" \
    -kernel "$image/kernel" -initrd "$run/initrd" \
    -append "console=ttyS0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests no_timer_check disks=$(IFS=, && echo "${names[*]}") result=$result" \
    >&2 || status=$?
finish_run "$status"
