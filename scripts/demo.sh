#!/usr/bin/env bash
# Serves a disk, moves an image in and back, uses it through the rings, and prints rates. Three minutes at most.
# Leaves nothing behind: processes, sockets and files go away, also after a failure or Ctrl-C.
set -euo pipefail
cd "$(dirname "$0")/.."

pvblk=${PVBLK_BIN:-${CARGO_TARGET_DIR:-target}/release/pvblk}
lab=$(dirname "$pvblk")/pvblk-lab
seconds=${DEMO_SECONDS:-4} # for each rate
size_mib=256

dir=$(mktemp -d "${TMPDIR:-/tmp}/pvblk-demo.XXXXXX")
# No control socket at the usual place of a server of the system.
export PVBLK_CONTROL=none
serve='' attach=''

# Ends the started processes: SIGTERM first, then SIGKILL.
cleanup() {
    local status=$? pid
    trap - EXIT INT TERM
    for pid in $attach $serve; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in $attach $serve; do
        for _ in {1..50}; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    # An interrupted demo prints no explanation.
    if ((status != 0 && status < 130)) && compgen -G "$dir/*.log" >/dev/null; then
        printf '\nLast output of the processes:\n' >&2
        tail -n 15 "$dir"/*.log >&2
    fi
    rm -rf "$dir"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() { printf '\n[%3d s] %s\n' "$SECONDS" "$*"; }
show() { printf '        $ %s\n' "${*//$dir/DIR}"; }
die() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

# Waits until a process says that it is ready. Arguments: process id, its log.
wait_ready() {
    for _ in {1..200}; do
        if grep -qx 'pvblk: ready' "$2"; then return; fi
        kill -0 "$1" 2>/dev/null || die "pvblk ended before it was ready"
        sleep 0.1
    done
    die "pvblk was not ready after 20 s"
}

# Prints the output of a process without its line `pvblk: ready`.
output_of() { sed -e '/^pvblk: ready$/d' -e "s|$dir|DIR|g" -e 's/^/        | /' "$1"; }

for tool in fio qemu-img jq; do
    command -v "$tool" >/dev/null || die "$tool is not installed: run scripts/install-tools.sh demo as root, or install it"
done
fio --enghelp 2>/dev/null | grep -qw nbd || die "this fio has no nbd engine"
[ -x "$pvblk" ] || die "$pvblk is not built: cargo build --release -p pvblk"

echo "pvblk demo on $(nproc) CPUs, Linux $(uname -r). DIR is $dir; it goes away at the end."
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

step "A file of $size_mib MiB, served over shared rings and over NBD"
truncate -s "${size_mib}M" "$dir/disk.img"
command=("$pvblk" serve --disk "a=file:$dir/disk.img" --local "unix:$dir/local.sock" --nbd "unix:$dir/nbd.sock")
show "${command[@]}"
"${command[@]}" >"$dir/serve.log" 2>&1 &
serve=$!
wait_ready "$serve" "$dir/serve.log"
output_of "$dir/serve.log"

step "An image with data and holes goes in, and is compared"
{
    head -c 100M /dev/urandom
    head -c 56M /dev/zero
    head -c 100M /dev/urandom
} >"$dir/image.raw"
nbd="nbd+unix:///a?socket=$dir/nbd.sock"
show qemu-img convert -n -f raw -O raw "$dir/image.raw" "$nbd"
qemu-img convert -n -f raw -O raw "$dir/image.raw" "$nbd"
show qemu-img compare -f raw -F raw "$dir/image.raw" "$nbd"
qemu-img compare -f raw -F raw "$dir/image.raw" "$nbd" | sed 's/^/        /'

step "A front end attaches through the rings: 2 queues of 8 pages; it offers the disk as NBD too"
command=("$pvblk" attach "unix:$dir/local.sock" --disk a --queues 2 --ring-pages 8 --nbd "unix:$dir/rings.sock")
show "${command[@]}"
"${command[@]}" >"$dir/attach.log" 2>&1 &
attach=$!
wait_ready "$attach" "$dir/attach.log"
output_of "$dir/attach.log"
rings="nbd+unix:///a?socket=$dir/rings.sock"

step "The same image, read through the rings"
show qemu-img compare -f raw -F raw "$dir/image.raw" "$rings"
qemu-img compare -f raw -F raw "$dir/image.raw" "$rings" | sed 's/^/        /'

step "fio writes and reads through the rings, and checks the checksum of every block (10 s)"
fio --name=verify --ioengine=nbd --uri="$rings" --rw=randrw --bssplit=4k/50:16k/25:64k/25 --iodepth=32 \
    --size="${size_mib}M" --verify=crc32c --verify_state_save=0 --verify_fatal=1 --verify_backlog=512 --serialize_overlap=1 \
    --time_based --runtime=10 --output-format=json --output="$dir/verify.json" ||
    die "fio found a wrong block, or an error"
jq -r '.jobs[0] | "        no wrong block: \(.write.total_ios) blocks written, \(.read.total_ios) read, \(.error) errors"' \
    "$dir/verify.json"

# One measured run. Arguments: path's name, uri, workload's name, fio's flags.
rate() {
    local path=$1 uri=$2 name=$3
    shift 3
    fio --name=rate --ioengine=nbd --uri="$uri" --size="${size_mib}M" --norandommap --randrepeat=1 \
        --time_based --runtime="$seconds" --ramp_time=1 --percentile_list=50:99 \
        --output-format=json --output="$dir/rate.json" "$@" || die "fio failed: $name over $path"
    jq -r --arg path "$path" --arg name "$name" '
        .jobs[0] | (if .read.total_ios > 0 then .read else .write end) as $r
        | [$path, $name, $r.iops / 1000, $r.bw_bytes / 1048576,
           $r.clat_ns.percentile["50.000000"] / 1000, $r.clat_ns.percentile["99.000000"] / 1000]
        | @tsv' "$dir/rate.json" |
        awk -F '\t' '{ printf "        %-10s %-22s %9.1f %9.0f %9.0f %9.0f\n", $1, $2, $3, $4, $5, $6 }'
}

step "Rates: one fio connection, $seconds s each, the file in this machine's page cache"
echo '        path       workload                   kIOPS     MiB/s    p50 µs    p99 µs'
for workload in 'randread 4k 1' 'randread 4k 32' 'randwrite 4k 32' 'read 128k 8'; do
    read -r rw bs depth <<<"$workload"
    for path in NBD rings+NBD; do
        uri=$nbd
        if [ "$path" != NBD ]; then uri=$rings; fi
        rate "$path" "$uri" "$rw $bs, depth $depth" --rw="$rw" --bs="$bs" --iodepth="$depth"
    done
done
cat <<'TEXT'
        NBD: the client's socket ends in the serving process. rings+NBD: it ends in the attached process, and
        the rings carry the request on; so the difference is what one more process and the rings cost.
TEXT

if [ -x "$lab" ]; then
    step "The rings without sockets, beside a bare ring"
    show "$lab" path --quick
    PVBLK_BIN=$pvblk "$lab" path --quick | sed 's/^/        /'
fi

step "Both stop: what is in flight is finished first"
for name in attach serve; do
    pid=${!name}
    kill -TERM "$pid"
    wait "$pid" || die "$name ended with status $?"
    declare "$name="
    echo "        $name ended with status 0"
done
if compgen -G "$dir/*.sock" >/dev/null; then die "a socket was left behind"; fi
step "Done; the folder goes away now"
