#!/usr/bin/env bash
# Installs the packages that the build, the tests and the demo need, and only those that are missing. It is safe to run again.
#
#   scripts/install-tools.sh build    compiler and make
#   scripts/install-tools.sh demo     those, and the clients that the demo runs
#   scripts/install-tools.sh deb      compiler and make, and what the Debian package is made with
#   scripts/install-tools.sh dist     those, and what makes the bill of materials
#   scripts/install-tools.sh test     those, and the tools of the tests (the default)
#   scripts/install-tools.sh bench    those, and the peers of make bench-remote
#
# Without root or apt it installs nothing and lists the missing packages: the tests that need them are skipped with that reason.
set -euo pipefail
cd "$(dirname "$0")/.."

CARGO_DENY_VERSION=0.20.2
CARGO_CYCLONEDX_VERSION=0.5.9
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/sbin:/sbin"

# command (or file), Debian package
build_tools=(gcc gcc  ld binutils  make make  /usr/include/stdio.h libc6-dev)
demo_tools=(fio fio  qemu-img qemu-utils  nbdinfo libnbd-bin  jq jq)
recipe_tools=(libvirtd libvirt-daemon-system  /usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so libvirt-daemon-driver-qemu  virsh libvirt-clients)
deb_tools=(dpkg-buildpackage dpkg-dev  dh debhelper  lowdown lowdown  git git  python3 python3)
test_tools=(g++ g++  openssl openssl  protoc protobuf-compiler  ministat ministat  blkparse blktrace  btt blktrace  nbdcopy libnbd-bin  nbdfuse libnbd-bin  fuse2fs fuse2fs  /usr/lib/python3/dist-packages/nbd.py python3-libnbd  nbdkit nbdkit  ip iproute2  fusermount3 fuse3
    mdadm mdadm  mkfs.ext4 e2fsprogs  e2fsck e2fsprogs  losetup mount  mount mount  blockdev util-linux  cmp diffutils
    qemu-system-x86_64 qemu-system-x86  qemu-storage-daemon qemu-system-common
    mkfs.xfs xfsprogs  mkfs.btrfs btrfs-progs  mkfs.vfat dosfstools  mkfs.exfat exfatprogs  mkntfs ntfs-3g  mkfs.f2fs f2fs-tools
    ceph-mon ceph-mon  ceph-osd ceph-osd  rbd ceph-common  /usr/lib/x86_64-linux-gnu/librbd.so.1 librbd1
    chromium chromium  sfdisk fdisk  cryptsetup cryptsetup-bin  mksquashfs squashfs-tools  genisoimage genisoimage  make-bcache bcache-tools
    debootstrap debootstrap  lintian lintian  mandoc mandoc  groff groff  zsh zsh  fish fish  systemd-analyze systemd
    curl curl  prometheus prometheus  promtool prometheus  python3 python3
    /usr/lib/python3/dist-packages/prometheus_client/openmetrics/parser.py python3-prometheus-client)

bench_tools=(/usr/lib/x86_64-linux-gnu/qemu/block-rbd.so qemu-block-extra)

say() { printf 'tools: %s\n' "$*" >&2; }

# Prints the packages whose command or file is missing, each once.
missing_packages() {
    while (($# >= 2)); do
        command -v "$1" >/dev/null 2>&1 || [ -f "$1" ] || printf '%s\n' "$2"
        shift 2
    done | sort -u
}

install_packages() {
    local missing=("$@")
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        say "missing packages: ${missing[*]}; install them as root, or go without"
        return 0
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # One failed download must not stop the steps that don't need it; tests that do are skipped.
    if ! { apt-get -q update && apt-get -q install -y --no-install-recommends "${missing[@]}"; } >&2; then
        say "could not install ${missing[*]}"
    fi
}

# Builds a cargo command, once: its name, its version, and what goes without it. The build has a target folder of its own, so it leaves no files in this
# tree. It runs from here, so that the pinned toolchain is used.
install_cargo() {
    command -v "$1" >/dev/null 2>&1 && return 0
    say "building $1 $2 (once; some minutes)"
    cargo install "$1" --version "$2" --locked --quiet || say "could not install $1; $3"
}

command -v cargo >/dev/null 2>&1 || {
    say "cargo is missing: install Rust with rustup, https://rustup.rs"
    exit 1
}

wanted=("${build_tools[@]}")
case "${1:-test}" in
build) ;;
demo) wanted+=("${demo_tools[@]}") ;;
deb) wanted+=("${deb_tools[@]}") ;;
dist) wanted+=("${deb_tools[@]}" "${recipe_tools[@]}") ;;
test) wanted+=("${demo_tools[@]}" "${deb_tools[@]}" "${test_tools[@]}") ;;
bench) wanted+=("${demo_tools[@]}" "${deb_tools[@]}" "${test_tools[@]}" "${bench_tools[@]}") ;;
*)
    say "unknown set '$1': build, demo, deb, dist, test or bench"
    exit 2
    ;;
esac

mapfile -t missing < <(missing_packages "${wanted[@]}")
if ((${#missing[@]})); then install_packages "${missing[@]}"; fi
case "${1:-test}" in
test)
    install_cargo cargo-deny "$CARGO_DENY_VERSION" 'the licence check will be skipped'
    ;;
dist) install_cargo cargo-cyclonedx "$CARGO_CYCLONEDX_VERSION" 'there is no release without it' ;;
esac

# Only the compiler and the linker are needed for everything.
command -v gcc >/dev/null 2>&1 || {
    say "there is no C compiler to link with: install gcc"
    exit 1
}
