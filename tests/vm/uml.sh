#!/usr/bin/env bash
# Runs a script as root in a Linux that is a process of this machine: user-mode Linux. Faster than guest.sh, with one
# CPU and no blktrace.
#
#   tests/vm/uml.sh --script FILE --out DIR [--add FILE]... [--disk IMG]... [--memory MB] [--seconds N]
#
# As guest.sh, but the disks are /dev/ubda and so on: the script's arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
arguments "$@"
((dom0_mb == 0)) && [ -z "$with" ] || usage '--dom0-memory and --with are for xen.sh'
((${#vhosts[@]} == 0)) || usage '--vhost is for guest.sh'
for program in gcc readelf sha256sum timeout; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done

make_image() {
    local modules
    modules=$(echo "$packages"/usr/lib/uml/modules/*)
    # This kernel looks at where its own memory begins, so it can't be started by its loader as other programs are.
    cp "$packages/usr/bin/linux.uml" "$1/kernel"
    packaged usr/bin/patchelf --set-interpreter "$packages/usr/lib64/ld-linux-x86-64.so.2" \
        --force-rpath --set-rpath "$packages/usr/lib/x86_64-linux-gnu" "$1/kernel"
    gcc -O2 -shared -fPIC -o "$1/ptrace.so" "$here/uml-ptrace.c"
    make_initramfs "$1/initramfs" "$modules"
}

cached_image uml
prepare_run

letters=abcdefghijklmnop
names=() drives=()
for file in "${disks[@]}" "$run/out"; do
    number=${#names[@]}
    names+=("/dev/ubd${letters:number:1}")
    # The kernel cuts at commas and spaces; a link's name has none.
    ln -s "$(realpath "$file")" "$run/disk$number"
    drives+=("ubd$number=$run/disk$number")
done
result=${names[-1]}
unset 'names[-1]'
status=0
limited env LD_PRELOAD="$image/ptrace.so" "$image/kernel" \
    mem="${memory_mb}M" initrd="$run/initrd" uml_dir="$run/" umid=guest con=null con0=null,fd:1 loglevel=4 panic=-1 \
    "${drives[@]}" disks="$(IFS=, && echo "${names[*]}")" result="$result" >"$run/console" 2>&1 || status=$?
finish_run "$status"
