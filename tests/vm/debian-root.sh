#!/usr/bin/env bash
# Makes the root file system of debian.sh, and prints the folder that has it (`root.img`), its kernel (`kernel`) and that one's modules (`modules`).
#
#   tests/vm/debian-root.sh
#
# It is Debian 12 by debootstrap, with systemd and a few clients; nothing of this machine but its mirror goes into it. With the same list of packages, a
# second run does nothing. Status 125: this machine can't do it; the last line says why.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export PATH=$PATH:/usr/sbin:/sbin

suite=bookworm
packages=(systemd systemd-sysv kmod linux-image-cloud-amd64 qemu-utils libnbd-bin)
folder=$cache/debian
stamp="$suite ${packages[*]}"

for program in debootstrap apt-get mkfs.ext4 flock; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done
[ "$(id -u)" -eq 0 ] || cannot 'debootstrap works as root only'
mkdir -p "$cache"
# One run at a time; later ones find it in place.
exec 9>"$cache/lock"
flock 9
if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    printf '%s\n' "$folder"
    exit
fi

say 'making a root file system with debootstrap; once'
work=$cache/debootstrap
rm -rf "$work" "$folder"
mkdir -p "$work"
find_mirror
root=$work/root
# The kernel's package would have an initramfs made, which nobody uses here.
names=$(IFS=, && echo "${packages[*]}")
debootstrap --variant=minbase "--include=$names" "$suite" "$root" "$mirror" >"$work/log" 2>&1 9>&- ||
    cannot "debootstrap: $(grep -E '^E:' "$work/log" | tail -n 1)"
cp "$root"/boot/vmlinuz-* "$work/kernel"
cp -r "$root/usr/lib/modules" "$work/modules"
rm -rf "$root"/boot/* "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
mkdir -p "$root/var/lib/apt/lists/partial"
echo guest >"$root/etc/hostname"
mkfs.ext4 -q -d "$root" -L root "$work/root.img" 2G >>"$work/log" 2>&1 || cannot "mkfs.ext4: $(tail -n 1 "$work/log")"
rm -rf "$root"
printf '%s\n' "$stamp" >"$work/stamp"
# Only a complete folder gets the name.
mv "$work" "$folder"
printf '%s\n' "$folder"
