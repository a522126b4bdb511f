#!/bin/bash
# For xen.sh, in dom0: our server, /add/pvblk, a guest whose front end in user space, /add/hostile_front, breaks rules on one disk, and a stock
# guest that checks its data on another one meanwhile. Every step says `passed STEP`, or the script ends.
set -Eeuo pipefail
# shellcheck disable=SC1091
source /lib/xen-lab.sh
trap 'script_failed /out/serve.log /out/evil.console' ERR

step() { echo "passed $* (at $(cut -d ' ' -f 1 /proc/uptime) s)"; }

truncate -s 16M /run/a.img
truncate -s 32M /run/b.img
/add/pvblk serve --xen --control unix:/run/control --disk a=file:/run/a.img --disk b=file:/run/b.img 2>/out/serve.log &
server=$!
until grep -q '^pvblk: ready' /out/serve.log; do sleep 0.2; done
guest_add=/add/hostile_front guest_create evil - 1 192 front=none
guest_create good - 2 256
guest_says evil 300 '^init:'
guest_says good 300 '^init:'
/add/pvblk xen attach b good xvda
# The other disk has no front end until the program runs.
/add/pvblk xen attach --no-wait a evil xvda
guest_run good 60 'await_disk xvda'

guest_run good 900 'while [ ! -e /tmp/enough ]; do
    fio --name=v --filename=/dev/xvda --rw=randwrite --bsrange=4k-64k --size=4M --iodepth=8 --ioengine=libaio --direct=1 --verify=crc32c \
        --verify_fatal=1 --output-format=terse >/tmp/terse || exit
    echo "good round"
    xenstore-exists words/enough && touch /tmp/enough
done; true' &
checking=$!

for case in good ring-ref event-channel grants segments index revoked garbage storm states vanish; do
    guest_run evil 240 "/add/hostile_front 51712 $case"
    kill -0 "$server"
    step "hostile: $case"
done
tr -d '\r' </out/evil.console | grep -e '^  '

rounds() { grep -c 'good round' /out/good.console || true; }
before=$(rounds)
until [ "$(rounds)" -gt $((before + 1)) ]; do kill -0 "$checking"; sleep 0.5; done
guest_tell good enough
wait "$checking"
step "the other guest's disk went on, $(rounds) rounds of checked data"

for rule in 'mapping ring-ref' 'binding event-channel' 'grants nothing' 'segment covers' 'the disk is stopped' 'makes no sense'; do grep -q -e "$rule" /out/serve.log; done
sed 's/\x1b\[[0-9;]*m//g' /out/serve.log | grep WARN | sort | uniq -c | sort -rn | head -n 20
step 'the log names the rules'

/add/pvblk xen detach evil xvda --force || true
/add/pvblk xen detach good xvda
/add/pvblk xen list
guest_destroy evil
guest_destroy good
kill "$server"
wait "$server"
step 'the server stops in order'
