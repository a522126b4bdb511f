#!/bin/bash
# For uml.sh or guest.sh with two disks: carries out a plan for RAID-5 arrays of the kernel's md. The first disk is divided into slots,
# which hold the members of all arrays; the second disk has the plan. Its first line has the size of a slot in MiB, and their number:
#
#   array NAME SLOT...                members of an array; slots are numbered from 0
#   make NAME LAYOUT POLICY CHUNK     a new array; chunks in KiB
#   assemble NAME [OPTION]...         mdadm's options
#   try NAME [OPTION]...              the same, and it may fail
#   fill NAME                         new data everywhere, and then in parts of stripes
#   check NAME                        leaves the result of md's check
#   sum NAME WHAT                     leaves the sha256 of the array's data
#   rebuild NAME SLOT MIB             onto a slot that isn't the array's, in the place of its second member, up to there
#   rebuilt NAME SLOT                 leaves the number of sectors written to a slot so far
#   stop NAME                         leaves the kernel's messages
#
# Leaves in a folder of each array: `mdadm`, mdadm's output; `dmesg`, the kernel's messages; `tried`, the status of `try`; `mismatches`;
# the sums; `rebuilt`. Processes are slow in user-mode Linux: there are few.
set -euo pipefail
uname -r >/out/kernel
modprobe md-mod
modprobe raid456
# Messages of the partial parity log, if this kernel has them.
if [ -e /proc/dynamic_debug/control ]; then
    echo 'file raid5-ppl.c func ppl_load +p' >/proc/dynamic_debug/control
    echo 'file raid5-ppl.c format "write parity" +p' >/proc/dynamic_debug/control
    echo 'file md.c format "resuming" +p' >/proc/dynamic_debug/control
fi
declare -A members=() devices=()
mkfifo /tmp/never
exec 9<>/tmp/never
nap() { read -r -t 0.02 -u 9 || true; }

# Slots are /dev/dm-0 and so on.
slots() {
    local sectors=$(($1 * 2048)) table='' n
    for ((n = 0; n < $2; n++)); do table+="slot$n,,$n,rw,0 $sectors linear $store $((n * sectors));"; done
    dmsetup create --concise "${table%;}"
}

array() {
    members[$1]=$(printf ' /dev/dm-%s' "${@:2}")
    devices[$1]=/dev/md${#devices[@]}
    mkdir "/out/$1"
}

# `mdadm` for an array: its device and more arguments; the output is kept.
tell() {
    mdadm "$2" "${devices[$1]}" "${@:3}" </dev/null >>"/out/$1/mdadm" 2>&1
}

make() {
    local how=("--consistency-policy=$3" --bitmap=none)
    case $3 in bitmap) how=(--bitmap=internal) ;; ppl) how=(--consistency-policy=ppl) ;; esac
    # shellcheck disable=SC2086
    set -- "$1" "$2" "$4" ${members[$1]}
    tell "$1" --create --run --level=5 "--raid-devices=$(($# - 3))" --metadata=1.2 "--layout=$2" "--chunk=$3" \
        "--name=$1" "${how[@]}" "${@:4}"
    settle "$1"
}

assemble() {
    # shellcheck disable=SC2086
    tell "$1" --assemble "${@:2}" ${members[$1]} || { cat "/out/$1/mdadm" && return 1; }
    settle "$1"
}

try() {
    local status=0
    # shellcheck disable=SC2086
    tell "$1" --assemble "${@:2}" ${members[$1]} || status=$?
    echo "$status" >"/out/$1/tried"
}

# Waits until a resync, a rebuild or a check is done. It may not have begun yet, which mdadm would take for done.
settle() {
    local idle=0 action
    while ((idle < 5)); do
        read -r action <"/sys/block/${devices[$1]##*/}/md/sync_action"
        if [ "$action" = idle ]; then idle=$((idle + 1)); else idle=0; fi
        nap
    done
}

fill() {
    local sectors n
    read -r sectors <"/sys/block/${devices[$1]##*/}/size"
    dd if=/dev/urandom of="${devices[$1]}" bs=64k count=$((sectors / 128)) status=none
    for n in 3 21; do
        dd if=/dev/urandom of="${devices[$1]}" bs=512 seek=$((RANDOM * (sectors - n) / 32768)) count="$n" conv=fsync,notrunc status=none
    done
}

check() {
    local md=/sys/block/${devices[$1]##*/}/md
    echo check >"$md/sync_action"
    settle "$1"
    echo "$(<"$md/mismatch_cnt")" >"/out/$1/mismatches"
}

sum() {
    echo 3 >/proc/sys/vm/drop_caches
    sha256sum <"${devices[$1]}" >"/out/$1/$2"
}

rebuild() {
    local md=/sys/block/${devices[$1]##*/}/md list=() sectors
    read -ra list <<<"${members[$1]}"
    mdadm --fail --quiet "${devices[$1]}" "${list[1]}"
    mdadm --remove --quiet "${devices[$1]}" "${list[1]}"
    echo 2000 >"$md/sync_speed_max"
    echo 1000 >"$md/sync_speed_min"
    mdadm --add --quiet "${devices[$1]}" "/dev/dm-$2"
    for _ in {1..1000}; do
        read -r sectors _ <"$md/sync_completed"
        if [ "$sectors" != none ] && ((sectors > $3 * 2048)); then return; fi
        nap
    done
    return 1
}

rebuilt() {
    local numbers
    read -ra numbers <"/sys/block/dm-$2/stat"
    echo "${numbers[6]}" >"/out/$1/rebuilt"
}

stop() {
    mdadm --stop --quiet "${devices[$1]}"
    dmesg -c | grep -E 'md|raid|ppl' >"/out/$1/dmesg" || true
}

store=$1
{
    read -r size count
    slots "$size" "$count"
    dmesg -c >/dev/null
    while read -r verb name rest; do
        echo "$verb $name $rest"
        # shellcheck disable=SC2086
        "$verb" "$name" $rest </dev/null
    done
} < <(tr -d '\0' <"$2")
sync
