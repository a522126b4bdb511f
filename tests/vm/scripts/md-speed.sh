#!/bin/bash
# For uml.sh with two disks: rates of the kernel's md on ram disks, one sample at a time. Commands come on the first disk, replies go to the
# second; `pvblk-lab md` is at the other side. Each is a text of at most one sector, which is complete if its last word is `end`:
#
#   NUMBER set FILE VALUE end            a file of /sys/block/md0/md
#   NUMBER sample DEVICE OPTION... end   one run of fio, with more options; DEVICE is md0, or ram4, which is the disk alone
#   NUMBER check end                     md's check of parity
#   NUMBER quit end
#
#   NUMBER begun end                     a sample's writes have begun
#   NUMBER done KIB MILLISECONDS WRITES end     fio's counts (a sample); 0 0 MISMATCHES (a check); 0 0 0
#   NUMBER failed WHAT end
#
# Commands are numbered from 1. The array is RAID-5 of four, chunks of 64 KiB, without log and bitmap; parity is right from the start, since
# all is zeros. Its members are brd's, the cheapest disks that this kernel has. Leaves `about`: the array and the kernel. Processes
# are slow in user-mode Linux: there are few.
set -euo pipefail
orders=$1 answers=$2
member_kib=49152
modprobe md-mod
modprobe raid456
modprobe brd rd_nr=5 rd_size=98304 max_part=0
mdadm --create /dev/md0 --run --quiet --level=5 --raid-devices=4 --metadata=1.2 --chunk=64 --size="$member_kib" --layout=left-symmetric \
    --consistency-policy=resync --bitmap=none --assume-clean /dev/ram{0,1,2,3}
md=/sys/block/md0/md
[ "$(<"$md/consistency_policy")" = resync ]
# Nothing is written to superblocks between writes.
echo 0 >"$md/safe_mode_delay"
mkfifo /tmp/never
exec 9<>/tmp/never
{
    uname -r
    cat "$md"/{level,raid_disks,chunk_size,consistency_policy}
    dmesg | grep -o 'xor: using function.*' || true
    fio --version
} >/out/about

# A whole page, so the kernel doesn't read it first. The last close of the disk writes it.
answer() { printf '%-4095s\n' "$number $* end" >"$answers"; }

# `--exec_prerun` runs in a shell of its own.
cat >/tmp/begun <<'END'
#!/bin/sh
printf '%-4095s\n' "$(cat /tmp/number) begun end" >"$(cat /tmp/answers)"
END
chmod +x /tmp/begun
echo "$answers" >/tmp/answers

sample() {
    local kib='' line
    echo "$number" >/tmp/number
    fio --name=sample --filename="/dev/$1" --size=96M --direct=1 --time_based --thread=1 --gtod_reduce=1 --norandommap \
        --scramble_buffers=0 --output-format=terse --terse-version=3 --exec_prerun=/tmp/begun "${@:2}" >/tmp/said 2>&1 </dev/null || true
    # Version 3: error, and of writes KiB, rate, writes a second, milliseconds are the fields 5, 47 to 50.
    while IFS=';' read -ra line; do
        if [ "${line[0]:-}" = 3 ] && [ "${line[4]}" = 0 ]; then kib=${line[46]} writes=${line[48]} milliseconds=${line[49]}; fi
    done </tmp/said
    if [ -z "$kib" ]; then
        cat /tmp/said
        answer failed fio
    else
        answer done "$kib" "$milliseconds" "$writes"
    fi
}

check() {
    local action idle=0
    echo check >"$md/sync_action"
    # The check may not have begun.
    while ((idle < 5)); do
        read -r action <"$md/sync_action"
        if [ "$action" = idle ]; then idle=$((idle + 1)); else idle=0; fi
        read -r -t 0.02 -u 9 || true
    done
    answer done 0 0 "$(<"$md/mismatch_cnt")"
}

last=0
while :; do
    # No other process has the disk open, so each open reads it again.
    read -r line <"$orders" || line=''
    read -ra words <<<"$line"
    number=${words[0]:-0}
    if [ "$number" = "$last" ] || [ "${words[-1]:-}" != end ]; then
        read -r -t 0.02 -u 9 || true
        continue
    fi
    last=$number
    words=("${words[@]:1:${#words[@]}-2}")
    case ${words[0]} in
    set) if echo "${words[2]}" >"$md/${words[1]}"; then answer done 0 0 0; else answer failed "${words[1]}"; fi ;;
    sample) sample "${words[@]:1}" ;;
    check) check ;;
    quit)
        answer done 0 0 0
        break
        ;;
    *) answer failed "${words[0]}" ;;
    esac
done
mdadm --stop --quiet /dev/md0
