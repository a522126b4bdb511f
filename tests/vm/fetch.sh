#!/usr/bin/env bash
# Fetches the Debian packages of which guests are made, and prints the folder that has them.
#
#   tests/vm/fetch.sh [plain|xen|nbd]
#
# `plain` is for guest.sh and uml.sh; `xen` is what xen.sh needs besides, and `nbd` NBD clients of a later Debian, which run without a guest; each in a folder of its own. Nothing is installed: apt gets lists, caches and an empty package state of its own, so that it names all that the
# packages need, and they are unpacked beside each other. With the same list of packages, a second run does nothing.
# Status 125: this machine can't do it; the last line says why.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

suite=trixie
packages=(linux-image-amd64 user-mode-linux busybox-static bash kmod blktrace fio mdadm dmsetup e2fsprogs fdisk util-linux patchelf zstd)
folder=$cache/packages
case ${1:-plain} in
plain) ;;
xen)
    packages=(xen-hypervisor-4.20-amd64 xen-utils-4.20 xenstore-utils qemu-system-xen strace)
    folder=$cache/packages-xen
    ;;
nbd)
    packages=(libnbd-bin qemu-utils python3-libnbd)
    folder=$cache/packages-nbd
    ;;
*)
    say "unknown set $1"
    exit 2
    ;;
esac
stamp="$suite ${packages[*]}"

for program in apt-get dpkg flock; do
    command -v "$program" >/dev/null || cannot "no $program here: guests are made from Debian's packages"
done
mkdir -p "$cache"
# One run at a time; later ones find the packages in place.
exec 9>"$cache/lock"
flock 9
if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    printf '%s\n' "$folder"
    exit
fi

work=$cache/fetching
rm -rf "$work" "$folder"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/root"
: >"$work/status"
# The machine's own mirror of Debian, with another suite.
find_mirror
# Releases are signed with the key of the one before too, so an older machine's keys will do.
options=target=Packages
keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [ -f "$keys" ]; then options+=" signed-by=$keys"; fi
printf 'deb [%s] %s %s main\n' "$options" "$mirror" "$suite" >"$work/sources"
cat >"$work/apt.conf" <<END
Dir::Etc::SourceList "$work/sources";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "$work/state";
Dir::State::Status "$work/status";
Dir::Cache "$work/cache";
APT::Architecture "amd64";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Retries "2";
APT::Update::Error-Mode "any";
END
quiet() { APT_CONFIG=$work/apt.conf apt-get -q -y "$@" >"$work/log" 2>&1; }
if ! { quiet update && quiet install --download-only "${packages[@]}"; }; then
    cannot "can't fetch packages of $suite: $(grep -E '^[EW]:' "$work/log" | head -n 1)"
fi
for package in "$work"/cache/archives/*.deb; do dpkg -x "$package" "$work/root"; done
printf '%s\n' "$stamp" >"$work/root/stamp"
# Only a complete folder gets the name.
mv "$work/root" "$folder"
rm -rf "$work"
printf '%s\n' "$folder"
