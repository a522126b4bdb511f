#!/bin/bash
# trial.sh PVBLK SLOW_MEDIUM DIR [SEED]: a trial for an operator who has read only the guide. Serves nine disks in DIR until Ctrl-C, all with load; five of
# them have a problem, and which has which is drawn by SEED. SLOW_MEDIUM is the example of pvblk-e2e, whose file system makes media slow, so that no name
# tells. The operator gets DIR/hand-out.txt; DIR/answers.txt is for whoever counts.
set -euo pipefail
pvblk=$(realpath "$1")
slow=$(realpath "$2")
mkdir -p "$3"
cd "$3"
seed=${4:-$RANDOM}
media=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rmdir "$media" 2>/dev/null' EXIT

"$slow" "$media" --direct-io >slow.txt 2>&1 &
until grep -q ready slow.txt; do sleep 0.1; done
for name in a b c d e f g h i; do truncate -s 64M "$media/$name.img"; done
"$pvblk" raid create --raid-devices 3 "$media"/{a,b,c}.img >create.txt 2>&1
"$pvblk" raid create --raid-devices 3 "$media"/{g,h,i}.img >>create.txt 2>&1
# A member that takes 4 to 8 ms, a medium that takes 2 to 5 ms, and one below a cache that takes 1 to 2 ms.
printf '%s\n' 'set b.img read,write mix 0 1 1000 4 8' 'set d.img read,write mix 0 1 1000 2 5' 'set e.img read,write mix 0 1 1000 1 2' |
    while read -r line; do echo "$line" >"$media/.control"; done

mapfile -t names < <(printf 'vm%d\n' 1 2 3 4 5 6 7 8 9 | shuf --random-source=<(yes "$seed"))
disks=() limits=()
add() { disks+=(--disk "${names[$1]}=$2"); }
array() { printf 'raid5:[file:%s][file:%s][file:%s]' "$media/$1.img" "$media/$2.img" "$media/$3.img"; }
add 0 "$(array a b c)"
add 1 "file:$media/d.img,direct"
add 2 mem:64M
limits=(--limit "${names[2]}:iops=400")
add 3 mem:64M
add 4 "cache:4M:file:$media/e.img,direct"
add 5 "$(array g h i)"
add 6 "file:$media/f.img,direct"
add 7 mem:64M
add 8 mem:64M
printf '%s: %s\n' \
    "${names[0]}" 'a member of the array, b.img, is slow' "${names[1]}" 'its medium is slow' "${names[2]}" 'its limit of 400 requests a second holds it back' \
    "${names[3]}" 'the guest asks seldom: the time is not in the server' "${names[4]}" 'the cache is too small for what is read' \
    "${names[5]}, ${names[6]}, ${names[7]}, ${names[8]}" 'well' >answers.txt

"$pvblk" serve --control unix:ctl.sock --nbd unix:nbd.sock --web tcp:127.0.0.1:0 "${disks[@]}" "${limits[@]}" >server.txt 2>&1 &
until grep -q 'pvblk: ready' server.txt; do sleep 0.1; done
load() {
    local disk=${names[$1]}
    "$pvblk" bench --target "nbd+unix:///$disk?socket=nbd.sock" --rw randread --runtime 3600 "${@:2}" >"load-$disk.txt" 2>&1 &
}
load 0 --iodepth 4
load 1 --iodepth 4
load 2 --iodepth 4
load 3 --iodepth 1 --option thinktime=12ms
load 4 --iodepth 4
load 5 --iodepth 2 --option rate_iops=200
load 6 --iodepth 2 --option rate_iops=200
load 7 --iodepth 4 --option rate_iops=500
load 8 --iodepth 1 --option rate_iops=300
{
    echo "Nine disks are served: vm1 to vm9. Owners of five virtual machines say that their disk is slow; they don't say which five. Find out which, and why."
    echo "Control socket: unix:$PWD/ctl.sock"
    grep -o 'page and metrics on .*' server.txt
} >hand-out.txt
cat hand-out.txt
wait
