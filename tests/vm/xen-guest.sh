# shellcheck shell=bash
# Functions for the scripts of guests. Sourced, not run.

# Waits up to $2 seconds (120) until dom0 has sent the word $1, and prints the value that came with it. Uses a watch, because
# polling would keep an emulated processor busy.
await_word() {
    local end=$((SECONDS + ${2:-120})) watch pid value
    # A path without a slash in front is in the guest's own part of the store. The first event comes at once.
    exec {watch}< <(exec xenstore-watch "words/$1")
    pid=$!
    while read -r -t "$((end > SECONDS ? end - SECONDS : 1))" -u "$watch"; do
        if value=$(xenstore-read "words/$1" 2>/dev/null); then
            kill "$pid"
            exec {watch}<&-
            printf '%s\n' "$value"
            return 0
        fi
    done
    kill "$pid"
    exec {watch}<&-
    echo "dom0 didn't tell $1"
    return 1
}

# Waits up to $2 seconds (120) until the disk $1, `xvda` for example, is there and can be read.
await_disk() {
    local end=$((SECONDS + ${2:-120}))
    until [ -b "/dev/$1" ] && [ "$(cat "/sys/block/$1/size")" != 0 ]; do
        ((SECONDS < end)) || { echo "no disk $1" && return 1; }
        sleep 0.1
    done
}

# Waits up to $2 seconds (120) until the disk $1 is gone.
await_no_disk() {
    local end=$((SECONDS + ${2:-120}))
    while [ -e "/sys/block/$1" ]; do
        ((SECONDS < end)) || { echo "disk $1 is still there" && return 1; }
        sleep 0.1
    done
}

# Number of queues of the disk $1.
queues_of() { find "/sys/block/$1/mq" -mindepth 1 -maxdepth 1 | wc -l; }

# trace_disk DISK SECONDS ARGUMENT...: has fio read and write the disk, with these arguments, while blktrace runs; its files are then an
# archive at the disk's beginning.
trace_disk() {
    local disk=$1 seconds=$2 tracer
    shift 2
    [ -d /sys/kernel/debug/block ] || mount -t debugfs debugfs /sys/kernel/debug
    rm -rf /tmp/trace
    mkdir /tmp/trace
    blktrace -D /tmp/trace "/dev/$disk" >/tmp/blktrace.log &
    tracer=$!
    until [ -f "/tmp/trace/$disk.blktrace.0" ]; do sleep 0.1; done
    fio --name=t --filename="/dev/$disk" --runtime="$seconds" --time_based --ioengine=libaio --direct=1 --output-format=terse "$@" >/tmp/terse
    kill -INT "$tracer"
    wait "$tracer" || true
    cat /tmp/blktrace.log
    tar -cf "/dev/$disk" -C /tmp/trace .
    sync
}

# Runs commands that dom0 sends by guest_run, until the guest is destroyed.
serve() {
    local n=1 start command status
    start=$(xenstore-read domid)
    while :; do
        command=$(await_word "run-$n" 86400)
        # In a shell of its own, so that errors and changes of the folder don't affect the next.
        status=0
        bash -ec "source /lib/guest.sh; $(printf '%s' "$command" | base64 -d)" || status=$?
        echo
        echo "guest-run-status $start-$n $status"
        n=$((n + 1))
    done
}
