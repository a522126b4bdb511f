#!/bin/bash
# Runs the tests of crates that lend memory and take it back, and their simulations, with the bugs that these have to find, under AddressSanitizer. Usage: asan.sh test [--no-run] | asan.sh has | asan.sh SEEDS
# The pinned stable compiler has the sanitizer's library, but accepts the flag only with RUSTC_BOOTSTRAP.
set -euo pipefail
cd "$(dirname "$0")/.."

sysroot=$(rustc --print sysroot)
host=$(rustc -vV | sed -n 's/^host: //p')
if ! ls "$sysroot/lib/rustlib/$host/lib/"librustc-*_rt.asan.a >/dev/null 2>&1; then
    echo 'asan.sh: this toolchain has no AddressSanitizer' >&2
    exit 3
fi
export RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=address --cfg pvblk_asan'
# A simulation that found a bug leaves its state allocated: that is no leak.
export ASAN_OPTIONS=detect_leaks=0
args=(--target "$host" --target-dir "${CARGO_TARGET_DIR:-target}/asan" --locked)
case ${1:-test} in
has) ;;
test) cargo test "${args[@]}" "${@:2}" --no-fail-fast -p pvblk-sys -p pvblk-backend -p pvblk-cache -p pvblk-sim --features pvblk-sim/planted ;;
*)
    cargo build "${args[@]}" -p pvblk-sim --features planted
    for kind in squeeze cache raid; do
        "${CARGO_TARGET_DIR:-target}/asan/$host/debug/pvblk-sim" "$kind" --seeds "$1"
    done
    ;;
esac
