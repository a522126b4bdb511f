#!/usr/bin/env bash
# Instructions for each 4 KiB read over the rings, on each side, counted by callgrind: with the trace hooks while no trace is
# recorded, with the hooks compiled away, while one request in 64 is recorded, and while all are. The difference of the first two is
# the cost of hooks that are off.
#
#   scripts/instructions.sh [REQUESTS [DEPTH...]]
set -euo pipefail
cd "$(dirname "$0")/.."
requests=${1:-20000}
shift || true
depths=("${@:-1}")
(($#)) || depths=(1 32)
target=${CARGO_TARGET_DIR:-target}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cargo build --quiet --release --locked -p pvblk-lab
cargo build --quiet --release --locked -p pvblk-lab --features untraced --target-dir "$target/untraced"

# binary, side, depth, options
count() {
    valgrind --tool=callgrind --callgrind-out-file="$out/profile" --toggle-collect="*instructions::$2*" \
        "$1" instructions --requests "$requests" --depth "$3" "${@:4}" 2>&1 |
        awk -v n="$requests" '/Collected/ { printf "%.1f", $4 / n }'
}

difference() {
    awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f", a - b }'
}

printf '%-12s %6s %8s %9s %6s %8s %6s\n' side depth hooks without cost 1-in-64 all
for depth in "${depths[@]}"; do
    for side in front_side back_side; do
        with=$(count "$target/release/pvblk-lab" "$side" "$depth")
        without=$(count "$target/untraced/release/pvblk-lab" "$side" "$depth")
        part=$(count "$target/release/pvblk-lab" "$side" "$depth" --every 64)
        all=$(count "$target/release/pvblk-lab" "$side" "$depth" --every 1)
        printf '%-12s %6d %8s %9s %6s %8s %6s\n' "$side" "$depth" "$with" "$without" \
            "$(difference "$with" "$without")" "$(difference "$part" "$with")" "$(difference "$all" "$with")"
    done
done
