# Functions of fetch.sh, guest.sh, uml.sh, xen.sh, debian.sh and debian-root.sh. Sourced, not run.
#
# Statuses of guest.sh, uml.sh, xen.sh and debian.sh: the script's own (1 if the script's is one of these).
#   2    wrong usage
#   123  the emulator broke the guest's CPU: see impossible_flags
#   124  the time limit
#   125  this machine can't run it; the last line says why
#   126  the guest ended without telling the script's status

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${PVBLK_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pvblk/vm}

say() { printf 'vm: %s\n' "$*" >&2; }

cannot() {
    say "$*"
    exit 125
}

usage() {
    say "$1; usage: $(basename "$0") --script FILE --out DIR [--add FILE]... [--disk IMG]... [--memory MB] [--seconds N]; see its head for more"
    exit 2
}

# Sets `mirror` to this machine's own mirror of Debian.
find_mirror() {
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1)
    [ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    [ -n "$mirror" ] || cannot 'apt has no mirror configured'
}

# Sets script, out, added, with, disks, vhosts, queues, cpus, memory_mb, dom0_mb and seconds from the command line.
arguments() {
    script='' out='' added=() with='' disks=() dom0_mb=0 vhosts=() queues=1 cpus=2 memory_mb=768 seconds=300
    while (($#)); do
        (($# >= 2)) || usage "$1 has no value"
        case $1 in
        --script) script=$2 ;;
        --out) out=$2 ;;
        --add) added+=("$2") ;;
        --with) with=$2 ;;
        --disk) disks+=("$2") ;;
        --vhost) vhosts+=("$2") ;;
        --queues) queues=$2 ;;
        --cpus) cpus=$2 ;;
        --memory) memory_mb=$2 ;;
        --dom0-memory) dom0_mb=$2 ;;
        --seconds) seconds=$2 ;;
        *) usage "unknown option $1" ;;
        esac
        shift 2
    done
    [ -n "$script" ] && [ -n "$out" ] || usage '--script and --out are needed'
    local file
    for file in "$script" "${added[@]}" "${disks[@]}"; do [ -f "$file" ] || usage "there is no file $file"; done
    ((${#disks[@]} + ${#vhosts[@]} < 16)) || usage 'there can be 15 disks'
    [[ "$memory_mb$dom0_mb$seconds$queues$cpus" =~ ^[0-9]+$ ]] ||
        usage '--memory, --dom0-memory, --seconds, --queues and --cpus take numbers'
}

# Runs a program of the packages with their own libraries: this machine's may be older.
packaged() { "$packages/usr/lib64/ld-linux-x86-64.so.2" --library-path "$packages/usr/lib/x86_64-linux-gnu" "$packages/$1" "${@:2}"; }

# Copies programs of the packages into a tree, with the libraries that they need.
copy_programs() {
    local tree=$1 todo=("${@:2}") file name
    mkdir -p "$tree/usr/bin" "$tree/usr/lib"
    while ((${#todo[@]})); do
        file=${todo[0]} todo=("${todo[@]:1}")
        case $file in
        *bin/*) cp "$packages/$file" "$tree/usr/bin/" ;;
        *) cp -L "$packages/$file" "$tree/usr/lib/" ;;
        esac
        while read -r name; do
            [ ! -e "$tree/usr/lib/$name" ] || continue
            name=$(cd "$packages" && find usr/lib -name "$name" | head -n 1)
            [ -z "$name" ] || todo+=("$name")
        done < <(readelf -d "$packages/$file" 2>/dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    done
}

# Copies modules of the kernel whose modules are in $1 into a tree, with those that they need, uncompressed: the guest
# is slow. A module that this kernel hasn't or has built in is left out.
copy_modules() {
    local source=$1 tree=$2 version base word file
    version=$(basename "$source")
    base=$(mktemp -d -p "$tree")
    mkdir -p "$base/usr/lib/modules" "$tree/usr/lib/modules/$version"
    ln -s usr/lib "$base/lib"
    cp -r "$source" "$base/usr/lib/modules/$version"
    packaged usr/sbin/depmod -b "$base" "$version"
    for word in "${@:3}"; do packaged usr/sbin/modprobe -d "$base" -S "$version" --show-depends "$word" 2>/dev/null || true; done |
        sed -n 's/^insmod \([^ ]*\).*/\1/p' | sort -u | while read -r file; do
        case $file in
        *.xz) "$busybox" unxz -c "$file" >"$tree/usr/lib/modules/$version/$(basename "$file" .xz)" ;;
        *) cp "$file" "$tree/usr/lib/modules/$version/" ;;
        esac
    done
    cp "$base/usr/lib/modules/$version"/modules.{order,builtin}* "$tree/usr/lib/modules/$version/"
    rm -rf "$base"
    packaged usr/sbin/depmod -b "$tree" "$version"
}

# Replaces fio's libraries for networks and clusters by an empty one: they have 40 MB, which take a guest a second
# to load, and fio another to start. Without a compiler they stay.
lean_fio() {
    local tree=$1 fio=$packages/usr/bin/fio name
    command -v gcc >/dev/null || return 0
    # Symbols have the version that fio expects, or else the loader would refuse or complain.
    readelf -W --dyn-syms "$fio" | awk '$7 == "UND" { print $8 }' | grep -E '^(rados|rbd|nfs|glfs|nbd|pmem|ibv|rdma)_' |
        awk -F @ -v base="$tree/stub" '
            { print "void " $1 "(void) {}" >base ".c"; if ($2) names[$2] = names[$2] $1 ";" }
            END { for (version in names) print version " { global: " names[version] " };" >base ".map" }'
    gcc -shared -fPIC -nostdlib "-Wl,--version-script=$tree/stub.map" -o "$tree/usr/lib/fio-stub.so" "$tree/stub.c"
    rm "$tree"/stub.{c,map}
    while read -r name; do
        ln -s fio-stub.so "$tree/usr/lib/$name"
    done < <(readelf -d "$fio" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -E '^lib(rados|rbd|nfs|gfapi|nbd|pmem|ibverbs|rdmacm)\.')
}

# Makes a tree with folders, busybox, and bash and the programs named after it, all of the packages.
make_tree() {
    local tree=$1
    mkdir -p "$tree"/{dev,proc,sys,run,tmp,out,etc,usr/bin,usr/lib}
    ln -s bin "$tree/usr/sbin"
    ln -s usr/bin "$tree/bin"
    ln -s usr/bin "$tree/sbin"
    ln -s usr/lib "$tree/lib"
    # The path of the loader that programs name.
    ln -s usr/lib "$tree/lib64"
    cp "$busybox" "$tree/usr/bin/busybox"
    lean_fio "$tree"
    copy_programs "$tree" usr/lib64/ld-linux-x86-64.so.2 usr/bin/bash "${@:2}"
}

# Packs a tree as an initramfs.
pack_tree() {
    (cd "$1" && find . | "$busybox" cpio -o -H newc -R 0:0 2>/dev/null) >"$2"
    rm -rf "$1"
}

# Makes an initramfs of the packages: $1 is the archive's name, $2 the kernel's modules.
make_initramfs() {
    local tree=$1.tree
    make_tree "$tree" usr/bin/fio \
        usr/sbin/{blktrace,mdadm,dmsetup,mkfs.ext4,e2fsck,blkdiscard,blockdev,fstrim,losetup,sfdisk}
    copy_modules "$2" "$tree" virtio_pci virtio_blk virtio_scsi sd_mod ahci loop brd null_blk nbd ext4 dm-mod dm-delay \
        dm-flakey md-mod raid0 raid1 raid456
    cp "$here/init" "$tree/init"
    pack_tree "$tree" "$1"
}

# Unpacks the packages' kernel to $1, as the ELF file that is inside: unpacking it in the guest would take longer than
# all the rest of the start. Sets `modules` to the folder of its modules.
unpack_kernel() {
    local kernel offset
    kernel=$(echo "$packages"/boot/vmlinuz-*)
    while read -r offset; do
        # Bytes behind the compressed part make zstd complain.
        tail -c +$((offset + 1)) "$kernel" | packaged usr/bin/zstd -dcq >"$1" 2>/dev/null || true
        if readelf -h "$1" >/dev/null 2>&1; then break; fi
    done < <(LC_ALL=C grep -abo $'\x28\xb5\x2f\xfd' "$kernel" | LC_ALL=C cut -d : -f 1)
    readelf -h "$1" >/dev/null 2>&1 || cannot 'no ELF file in the kernel'
    modules=$packages/usr/lib/modules/${kernel##*/vmlinuz-}
}

# Sets `image` to a folder of the cache that `make_image FOLDER` has filled, of the packages and, with `xen` as the second
# word, xen_packages; made again only when something that goes into it has changed.
cached_image() {
    local kind=$1 key
    packages=$("$here/fetch.sh") || exit
    xen_packages=$packages
    if [ "${2:-}" = xen ]; then xen_packages=$("$here/fetch.sh" xen) || exit; fi
    busybox=$packages/usr/bin/busybox
    key=$({ echo "$packages" && cat {"$packages","$xen_packages"}/stamp "$here/lib.sh" "$here/init" "$here/$kind"*; } | sha256sum | cut -c 1-16)
    image=$cache/$kind-$key
    exec 9>"$cache/lock"
    flock 9
    if [ ! -d "$image" ]; then
        say "making the guest of $kind.sh; once"
        rm -rf "$cache/$kind"-*
        mkdir "$cache/$kind-new"
        make_image "$cache/$kind-new"
        mv "$cache/$kind-new" "$image"
    fi
    flock -u 9
}

# Sets `run`, a folder for this run; the script and the folder `add` are in $run/initrd, behind the image's initramfs, and
# $run/out is an empty disk for the files that come back.
prepare_run() {
    run=$(mktemp -d)
    trap 'rm -rf "$run"' EXIT
    cp "$script" "$run/script"
    mkdir "$run/add"
    ((${#added[@]} == 0)) || cp "${added[@]}" "$run/add/"
    chmod -R +x "$run"/{script,add}
    # Paths of disks may be relative, so the folder changes only for this.
    { cat "$image/initramfs" && (cd "$run" && find script add | "$busybox" cpio -o -H newc -R 0:0 2>/dev/null); } >"$run/initrd"
    truncate -s 1G "$run/out"
    mkdir -p "$out"
    rm -f "$out"/{log,console}
}

# Runs the virtual machine within the time limit; it doesn't outlive this script, whether that is told to stop or killed.
# Until version 9.6, a `timeout` that is told to stop just after it started its program ends without it: so that program is bound to `timeout` too.
limited() {
    # One machine at a time: two would slow each other down and run into their time limits.
    exec 8>"$cache/running"
    flock 8
    setpriv --pdeathsig TERM timeout --kill-after=5 "$seconds" setpriv --pdeathsig KILL "$@" </dev/null 8>&- &
    # shellcheck disable=SC2064
    trap "kill $! 2>/dev/null; wait $! || true; exit 130" INT TERM
    wait "$!"
}

# True if a kernel's report in this file has flags that a CPU in 64-bit mode can't have: that of virtual 8086 mode (bit 17). QEMU 7.2 in
# software took the operand of a comparison for flags once, in some hundreds of guests, and the guest's kernel panicked.
impossible_flags() {
    local flags
    while read -r flags; do
        ((16#$flags & 16#20000)) && return
    done < <(sed -n 's/.*RSP: 0018:.* EFLAGS: \([0-9a-f]\{8\}\).*/\1/p' "$1")
    return 1
}

# Ends with the script's status, $1 being the virtual machine's, and leaves in the folder --out: the files that the script put
# into /out, `log` with its output, and `console`.
finish_run() {
    local status=126
    tr -d '\r' <"$run/console" >"$out/console"
    mkdir "$run/back"
    if tar -xf "$run/out" -C "$run/back" --no-same-owner 2>/dev/null && [ -f "$run/back/status" ]; then
        status=$(cat "$run/back/status")
        # The caller must not take a failure of the script for a machine that can't run it.
        case $status in 2 | 123 | 124 | 125 | 126) say "the script's status was $status" && status=1 ;; esac
        cp -R "$run/back/out/." "$out/"
    elif [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; then
        status=124
        say "killed after $seconds s"
    fi
    if ((status == 126)) && impossible_flags "$out/console"; then
        status=123
        say "the emulator broke the guest's CPU: it had flags that no CPU has"
    fi
    if ((status)); then
        # Without a log that came back, the console has most of it.
        if [ -f "$out/log" ]; then tail -n 60 "$out/log" >&2; else tail -n 60 "$out/console" >&2; fi
        say "status $status"
    fi
    exit "$status"
}
