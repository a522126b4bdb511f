#!/usr/bin/env bash
# Instructions for each 4 KiB read over the rings, on each side, counted by callgrind.
#
#   scripts/instructions.sh [REQUESTS [DEPTH]]
set -euo pipefail
cd "$(dirname "$0")/.."
requests=${1:-20000}
depth=${2:-32}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cargo build --quiet --release --locked -p pvblk
for side in front_side back_side; do
    valgrind --tool=callgrind --callgrind-out-file="$out/$side" --toggle-collect="*instructions::$side*" \
        "${CARGO_TARGET_DIR:-target}/release/pvblk" lab instructions --requests "$requests" --depth "$depth" 2>&1 |
        awk -v s="$side" -v n="$requests" '/Collected/ { printf "%s: %.0f instructions a request\n", s, $4 / n }'
done
