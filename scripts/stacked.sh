#!/usr/bin/env bash
# Instructions for each 4 KiB request to a page cache and a RAID-5 array over memory, counted by callgrind.
#
#   scripts/stacked.sh [REQUESTS [BINARY...]]
#
# Several binaries are compared side by side: builds of crates/volume/examples/stacked_cost.rs from other commits.
set -euo pipefail
cd "$(dirname "$0")/.."
requests=${1:-20000}
shift || true
binaries=("$@")
target=${CARGO_TARGET_DIR:-target}
if ((${#binaries[@]} == 0)); then
    cargo build --quiet --release --locked -p pvblk-volume --example stacked_cost
    binaries=("$target/release/examples/stacked_cost")
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# binary, kind
count() {
    valgrind --tool=callgrind --callgrind-out-file="$out/profile" --toggle-collect='*stacked_cost::counted*' \
        "$1" "$2" "$requests" 2>&1 |
        awk -v n="$requests" '/Collected/ { printf "%.1f", $4 / n }'
}

for kind in cache-hit cache-miss cache-write cache-two-queues array-read array-write array-two-queues; do
    printf '%-18s' "$kind"
    for binary in "${binaries[@]}"; do printf ' %10s' "$(count "$binary" "$kind")"; done
    printf '\n'
done
