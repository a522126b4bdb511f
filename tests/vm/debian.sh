#!/usr/bin/env bash
# Runs a script as root in a Debian 12 that systemd has booted, under QEMU in software.
#
#   tests/vm/debian.sh --script FILE --out DIR [--add FILE]... [--disk IMG]... [--cpus N] [--memory MB] [--seconds N]
#
# FILE is a script for bash; its arguments are the disks' paths, /dev/vdb and so on. Files that it leaves in /out come back in DIR, and its output is in
# DIR/log. Added files are in /run/vm/add. Each run has a fresh root file system, made by debian-root.sh, without a network. Statuses: see lib.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
arguments "$@"
((dom0_mb == 0 && ${#vhosts[@]} == 0)) && [ -z "$with" ] || usage '--dom0-memory, --with and --vhost are for other guests'
for program in qemu-system-x86_64 readelf sha256sum timeout; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done
debian=$("$here/debian-root.sh") || exit

make_image() {
    local tree=$1/tree
    mkdir -p "$tree"/{dev,proc,sys,root,usr/bin,usr/lib}
    ln -s usr/bin "$tree/bin"
    ln -s usr/lib "$tree/lib"
    cp "$busybox" "$tree/usr/bin/busybox"
    # The file system is part of this kernel.
    copy_modules "$(echo "$debian"/modules/*)" "$tree" virtio_pci virtio_blk
    cp "$here/debian-init" "$tree/init"
    pack_tree "$tree" "$1/initramfs"
}

cached_image debian
prepare_run

letters=abcdefghijklmnop
# The root file system is the first; what is written to it goes to a file that QEMU makes and forgets.
drives=(-drive "file=${debian//,/,,}/root.img,format=raw,if=none,id=d0,snapshot=on" -device 'virtio-blk-pci,drive=d0')
names=()
for file in "${disks[@]}" "$run/out"; do
    names+=("/dev/vd${letters:${#names[@]}+1:1}")
    # Commas separate QEMU's words; two stand for one.
    drives+=(-drive "file=${file//,/,,},format=raw,if=none,id=d${#names[@]},cache=unsafe" -device "virtio-blk-pci,drive=d${#names[@]}")
done
result=${names[-1]}
unset 'names[-1]'
status=0
# One thread for all CPUs: see guest.sh.
TMPDIR=$run limited qemu-system-x86_64 -machine q35 -accel tcg,thread=single -cpu max -smp "$cpus" -m "$memory_mb" \
    -display none -monitor none -serial "file:$run/console" -no-reboot -nic none "${drives[@]}" \
    -kernel "$debian/kernel" -initrd "$run/initrd" \
    -append "console=ttyS0 loglevel=4 panic=-1 mitigations=off no_timer_check systemd.getty_auto=0 disks=$(IFS=, && echo "${names[*]}") result=$result" \
    >&2 || status=$?
finish_run "$status"
