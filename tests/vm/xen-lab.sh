# shellcheck shell=bash
# Functions for scripts in dom0: Linux PV guests. Sourced, not run.
#
# A guest has bash, busybox, fio, mkfs.ext4, e2fsck, fstrim, blkdiscard, blockdev and the xenstore programs; functions for its
# script are in /lib/guest.sh for it to source. Its output is in /out/NAME.console.

lab=/run/guests
mkdir -p "$lab"
# Never readable: a read with a timeout is a sleep without another process.
[ -p "$lab/nothing" ] || mkfifo "$lab/nothing"
exec {lab_nothing}<>"$lab/nothing"
lab_sleep() { read -r -t "$1" -u "$lab_nothing" || true; }

# script_failed LOG...: prints the ends of logs, and last the line of the script that failed, also if that was in a function. For
# `trap 'script_failed LOG...' ERR` after `set -E`.
script_failed() {
    local line=${BASH_LINENO[-2]} log
    for log in "$@"; do
        [ ! -f "$log" ] || tr -d '\r' <"$log" | tail -n 40
    done
    echo "failed in line $line"
}

# guest_create NAME SCRIPT [VCPUS [MEMORY [ARGUMENTS [DISK...]]]]
#
# Makes a guest with so many virtual CPUs (4) and megabytes (384), and more arguments for its kernel, which are parameters
# of modules too: xen_blkfront.max_queues=2. Each disk is a line for xl, phy:/dev/loop0,xvda,w for example. SCRIPT is a
# file; instead of one, `-` makes a guest that runs commands of guest_run. Returns once the guest has begun to run.
#
# With guest_on_reboot=restart xl starts the guest anew when it reboots or crashes; with guest_add=FILE the guest finds that file in /add;
# guest_more are more lines of xl's configuration.
guest_create() {
    local name=$1 script=$2 vcpus=${3:-4} memory=${4:-384} arguments=${5:-} disks='' disk
    local folder=$lab/$name
    rm -rf "$folder"
    mkdir -p "$folder/add/add"
    [ -z "${guest_add:-}" ] || cp "$guest_add" "$folder/add/add/"
    if [ "$script" = - ]; then
        printf '#!/bin/bash\nsource /lib/guest.sh\nserve\n' >"$folder/add/script"
    else
        cp "$script" "$folder/add/script"
    fi
    chmod +x "$folder/add/script"
    { cat /guest/initramfs && (cd "$folder/add" && find script add | cpio -o -H newc -R 0:0 2>/dev/null); } >"$folder/initrd"
    for disk in "${@:6}"; do disks+="'$disk',"; done
    cat >"$folder/config" <<END
name = '$name'
type = 'pv'
kernel = '/guest/kernel'
ramdisk = '$folder/initrd'
memory = $memory
vcpus = $vcpus
extra = 'console=hvc0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests $arguments'
disk = [ $disks ]
on_poweroff = 'destroy'
on_reboot = '${guest_on_reboot:-destroy}'
on_crash = '${guest_on_reboot:-destroy}'
${guest_more:-}
END
    # The console's daemon has names of its own for what it logs.
    : >"/out/$name.console"
    ln -f "/out/$name.console" "/var/log/xen/console/guest-$name.log"
    if ! xl create "$folder/config" >"$folder/xl" 2>&1; then
        cat "$folder/xl"
        return 1
    fi
    # A guest that reboots is made of it again.
    [ "${guest_on_reboot:-}" = restart ] || rm "$folder/initrd"
    xl domid "$name" >"$folder/domid"
    guest_starts "$name"
}

# Commands of guest_run are numbered from each start of the guest; the domain's number then distinguishes the starts.
guest_starts() {
    echo 0 >"$lab/$1/runs"
    cp "$lab/$1/domid" "$lab/$1/start"
}

# guest_renew NAME SECONDS: waits until the guest is another domain than before.
guest_renew() {
    local end=$((SECONDS + $2)) now
    until now=$(xl domid "$1" 2>/dev/null) && [ "$now" != "$(guest_domid "$1")" ]; do
        ((SECONDS < end)) || { echo "guest $1 did not come back" && return 1; }
        lab_sleep 0.5
    done
    echo "$now" >"$lab/$1/domid"
}

# guest_reboot NAME SECONDS: lets a guest made with guest_on_reboot=restart reboot itself, and waits until it is there again.
guest_reboot() {
    local try
    guest_begin "$1" 'sync; reboot -f'
    for try in 1 2 3; do
        guest_renew "$1" "$2"
        guest_starts "$1"
        if guest_run "$1" "$2" :; then return 0; fi
        # As with dom0 in xen.sh, emulation now and then runs code that the kernel is just changing; xl starts it once more.
        grep -q 'Oops: int3' "/out/$1.console" || return 1
        echo "guest $1 crashed at start $try"
    done
    return 1
}

# The number of the guest's domain.
guest_domid() { cat "$lab/$1/domid"; }

# True if the guest still runs.
guest_runs() { xenstore-exists "/local/domain/$(guest_domid "$1")"; }

# guest_tell NAME WORD [VALUE]: for await_word in the guest.
guest_tell() { xenstore-write "/local/domain/$(guest_domid "$1")/words/$2" "${3:-1}"; }

# guest_says NAME SECONDS PATTERN: waits until a line of the guest's console matches, and prints the first that does. Fails
# when the guest has ended without one, or in time: SECONDS are for a machine with nothing else to do, and four times as many are waited.
guest_says() {
    local end=$((SECONDS + 4 * $2)) console line='' part ended='' looks=0
    exec {console}<"/out/$1.console"
    while :; do
        while IFS= read -r -u "$console" part; do
            line+=${part%$'\r'}
            if [[ $line =~ $3 ]]; then
                exec {console}<&-
                printf '%s\n' "$line"
                return 0
            fi
            line=''
        done
        line+=$part
        if [ -n "$ended" ] || ((SECONDS >= end)); then break; fi
        # Its last lines come before the domain's end, so they are looked at once more.
        ((++looks % 10)) || guest_runs "$1" || ended=1
        lab_sleep 0.2
    done
    exec {console}<&-
    return 1
}

# guest_wait NAME SECONDS: waits for the script's end and returns its status; 124 is no end in time, 126 an end without a
# status. Where it isn't 0, it prints the end of the guest's console.
guest_wait() { status_line "$1" "$2" '^guest-script-status [0-9]+$'; }

# guest_run NAME SECONDS COMMAND: has a guest made with `-` run a command for bash, and returns its status; as guest_wait. The
# command's output is in the guest's console.
guest_run() {
    guest_begin "$1" "$3"
    guest_end "$1" "$2"
}

# guest_end NAME SECONDS: waits for the end of the command of guest_begin.
guest_end() { status_line "$1" "$2" "^guest-run-status $(cat "$lab/$1/start")-$(cat "$lab/$1/runs") [0-9]+$"; }

# guest_begin NAME COMMAND: guest_run without waiting.
guest_begin() {
    local n
    n=$(($(cat "$lab/$1/runs") + 1))
    echo "$n" >"$lab/$1/runs"
    # Encoded, since the store's programs print other characters than they were given.
    guest_tell "$1" "run-$n" "$(printf '%s' "$2" | base64 | tr -d '\n')"
}

status_line() {
    local line status
    if line=$(guest_says "$@"); then
        status=${line##* }
    elif guest_runs "$1"; then
        status=124
    else
        status=126
    fi
    ((status == 0)) || { echo "guest $1: status $status" && tr -d '\r' <"/out/$1.console" | tail -n 20; }
    return "$status"
}

# Ends the guest, if it still runs, and waits until its domain is gone.
guest_destroy() {
    xl destroy "$(guest_domid "$1")" 2>/dev/null || true
    while guest_runs "$1"; do lab_sleep 0.2; done
}
