#!/usr/bin/env bash
# Runs the campaign of kills over a slow medium: CYCLES, then flags of `pvblk-lab crash`.
set -euo pipefail
cd "$(dirname "$0")/.."
built="${CARGO_TARGET_DIR:-target}/release"
cycles="${1:?usage: scripts/crash.sh CYCLES [FLAG…]}"
shift

point=$(mktemp -d)
"$built/examples/slow_medium" "$point" &
medium=$!
trap 'kill "$medium" 2>/dev/null; wait "$medium" 2>/dev/null; rmdir "$point" 2>/dev/null' EXIT
for _ in $(seq 300); do
    [ -e "$point/.control" ] && break
    kill -0 "$medium" 2>/dev/null || exit 1
    sleep 0.1
done
"$built/pvblk-lab" crash --cycles "$cycles" --medium "$point" "$@"
