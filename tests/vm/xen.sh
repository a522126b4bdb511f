#!/usr/bin/env bash
# Runs a script as root in dom0 of a real Xen under QEMU, in software; the script can start Linux PV guests.
#
#   tests/vm/xen.sh --script FILE --out DIR [--add FILE]... [--disk IMG]... [--memory MB] [--dom0-memory MB] [--cpus N]
#       [--seconds N] [--with qdisk]
#
# As guest.sh, with 2560 MB in all and 1024 of them for dom0 (guests get the others; Xen needs 150 itself) and 600 s. The script finds
# xenstored, xenconsoled and the modules of back ends running; functions for guests are in /lib/xen-lab.sh for it to
# source. `--with qdisk` brings in QEMU's back end, for guests' disks with backendtype=qdisk; it takes longer to start.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
arguments --memory 2560 --dom0-memory 1024 --seconds 600 "$@"
((${#vhosts[@]} == 0)) || usage '--vhost is for guest.sh'
[[ "$with" =~ ^(qdisk)?$ ]] || usage "--with takes qdisk"
for program in gunzip qemu-system-x86_64 readelf sha256sum timeout; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done

make_image() {
    local tree=$1/tree lib=usr/lib/xen-4.20
    gunzip -c "$xen_packages"/boot/xen-*-amd64.gz >"$1/xen"
    unpack_kernel "$1/kernel"

    make_tree "$tree" usr/bin/fio usr/sbin/{blktrace,mkfs.ext4,e2fsck,blkdiscard,blockdev,fstrim}
    packages=$xen_packages copy_programs "$tree" usr/bin/xenstore
    # Loaded by name when a thread ends.
    packages=$xen_packages copy_programs "$tree" usr/lib/x86_64-linux-gnu/libgcc_s.so.1
    # The others are for a driver domain, and for a front end of ours.
    copy_modules "$modules" "$tree" xen-blkfront xen-evtchn xen-gntdev xen-gntalloc xenfs ext4
    xenstore_names "$tree"
    cp "$here/xen-guest" "$tree/init"
    cp "$here/xen-guest.sh" "$tree/lib/guest.sh"
    pack_tree "$tree" "$1/guest"

    make_tree "$tree" usr/bin/fio usr/sbin/{dmsetup,mkfs.ext4,e2fsck,blkdiscard,blockdev,fstrim,losetup}
    packages=$xen_packages copy_programs "$tree" usr/bin/{xenstore,strace} \
        $lib/bin/{xl,xenstored,xenconsoled,xen-init-dom0,libxl-save-helper}
    # Loaded by name when a thread ends.
    copy_programs "$tree" usr/lib/x86_64-linux-gnu/libgcc_s.so.1
    copy_modules "$modules" "$tree" virtio_pci virtio_blk xen-evtchn xen-gntdev xen-gntalloc xenfs xen-privcmd \
        xen-blkback loop brd null_blk nbd ublk_drv ext4 dm-mod dm-delay dm-flakey
    xenstore_names "$tree"
    # Files that xl looks for where it would be installed.
    mkdir -p "$tree/$lib" "$tree/usr/libexec" "$tree/var"/{lib/xen,lock,log/xen/console} "$tree/guest"
    ln -s ../../bin "$tree/$lib/bin"
    ln -s /run "$tree/var/run"
    mkdir -p "$tree/etc/xen/scripts"
    cp "$here/xen-block" "$tree/etc/xen/scripts/block"
    : >"$tree/etc/xen/xl.conf"
    cp "$here/init" "$tree/init"
    cp "$here/xen-dom0" "$tree/init-more"
    cp "$here/xen-lab.sh" "$tree/lib/"
    cp "$1/kernel" "$tree/guest/kernel"
    mv "$1/guest" "$tree/guest/initramfs"
    make_qdisk "$tree" "$1"
    pack_tree "$tree" "$1/initramfs"
}

# An archive with QEMU for dom0, less the libraries that are there anyway.
make_qdisk() {
    local tree=$2/qdisk-tree program=xen-qemu-system-i386 file
    packages=$xen_packages copy_programs "$tree" "usr/libexec/$program"
    for file in "$tree"/usr/lib/*; do [ ! -e "$1/usr/lib/${file##*/}" ] || rm "$file"; done
    # QEMU doesn't start without a keymap, even with nothing to show.
    mkdir -p "$tree"/usr/{libexec,share/qemu}
    cp -r "$xen_packages/usr/share/qemu/keymaps" "$tree/usr/share/qemu/"
    mv "$tree/usr/lib/$program" "$tree/usr/libexec/"
    pack_tree "$tree" "$2/qdisk"
}

# One program has many names.
xenstore_names() {
    local file
    for file in "$xen_packages"/usr/bin/xenstore-*; do ln -s xenstore "$1/usr/bin/${file##*/}"; done
}

cached_image xen xen
prepare_run
[ -z "$with" ] || cat "$image/$with" >>"$run/initrd"

letters=abcdefghijklmnop
names=() drives=()
for file in "${disks[@]}" "$run/out"; do
    name=d${#names[@]}
    names+=("/dev/vd${letters:${#names[@]}:1}")
    # Commas separate QEMU's words; two stand for one.
    drives+=(-drive "file=${file//,/,,},format=raw,if=none,id=$name,cache=unsafe,discard=unmap"
        -device "virtio-blk-pci,drive=$name")
done
result=${names[-1]}
unset 'names[-1]'
# QEMU cuts modules at commas, and their arguments off at the first space.
ln -s "$image/kernel" "$run/kernel"
linux="console=hvc0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests disks=$(IFS=, && echo "${names[*]}") result=$result"
boot() {
    status=0
    # With SMAP, dom0 dies at its first step under emulation.
    limited qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu max,smap=off -smp "$cpus" -m "$memory_mb" \
        -display none -monitor none -serial "file:$run/console" -no-reboot -nic none "${drives[@]}" \
        -kernel "$image/xen" -initrd "$run/kernel ${linux//,/,,},$run/initrd" \
        -append "console=com1 com1=115200,8n1 dom0_mem=${dom0_mb}M,max:${dom0_mb}M dom0_max_vcpus=$cpus spec-ctrl=no,eager-fpu xpti=no" \
        >&2 || status=$?
}
boot
# The kernel changes its own code while it starts, and emulation with two CPUs now and then runs a half-changed instruction.
if ((status == 0)) && grep -q 'Oops: int3' "$run/console"; then
    say 'dom0 crashed on code that it had just changed; once more'
    boot
fi
finish_run "$status"
