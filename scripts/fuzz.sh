#!/usr/bin/env bash
# Fuzzes every target of fuzz/ for a share of SECONDS, and prints a `test result:` line.
#
#   scripts/fuzz.sh [SECONDS [TARGET…]]      SECONDS: all targets together; 20 for each if not given
#   scripts/fuzz.sh build                    builds the targets, and runs none
#
# Built with the pinned stable toolchain: libFuzzer needs only the compiler's coverage counters, which a stable
# compiler can emit, and a C++ compiler for itself. Without one, plain runs over random inputs take its place.
# Debug assertions and overflow checks are on. New inputs stay in target/fuzz/corpus; the seeds in fuzz/corpus are
# only read. A crash leaves its input in fuzz/artifacts/TARGET, and the line to run it again.
set -euo pipefail
cd "$(dirname "$0")/.."

targets=()
if (($# > 1)); then targets=("${@:2}"); fi
if ((${#targets[@]} == 0)); then
    for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi
seconds=${1:-$((20 * ${#targets[@]}))}
only_build=false
if [ "$seconds" = build ]; then only_build=true seconds=0; fi
share=$((seconds / ${#targets[@]}))
((share > 0)) || share=1

build=$PWD/target/fuzz
profile=fuzz
if ((seconds >= 600)); then profile=fuzz-long; fi

# Runs targets without coverage, and prints the reason.
smoke() {
    ! $only_build || exit 0
    echo "fuzz: no coverage: $1; random inputs instead"
    cargo run --quiet --profile "$profile" --locked -p pvblk-fuzz --target-dir "$build" --bin smoke -- \
        "$share" "${targets[@]}"
    exit
}

command -v "${CXX:-c++}" >/dev/null || smoke 'there is no C++ compiler'
triple=$(rustc -vV | sed -n 's/^host: //p')
# With an explicit target these flags don't reach build scripts and procedural macros.
flags="--cfg fuzzing -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks \
-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
bins=()
for target in "${targets[@]}"; do bins+=(--bin "$target"); done
# The requirements of libFuzzer may be missing here; broken code fails the plain build as well.
RUSTFLAGS=$flags cargo build --quiet --profile "$profile" --locked -p pvblk-fuzz --features libfuzzer \
    --target "$triple" --target-dir "$build" "${bins[@]}" || smoke 'the build with counters failed, see above'
! $only_build || exit 0

passed=0 failed=0
for target in "${targets[@]}"; do
    echo "fuzz: $target for $share s"
    fresh=$build/corpus/$target
    mkdir -p "$fresh" "fuzz/artifacts/$target"
    seeds=()
    if [ -d "fuzz/corpus/$target" ]; then seeds=("fuzz/corpus/$target"); fi
    if "$build/$triple/$profile/$target" -max_total_time="$share" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
        -print_final_stats=1 -artifact_prefix="fuzz/artifacts/$target/" "$fresh" "${seeds[@]}" >"$fresh.log" 2>&1; then
        passed=$((passed + 1))
        sed -n 's/^stat::number_of_executed_units: */fuzz:   executions: /p' "$fresh.log"
    else
        failed=$((failed + 1))
        grep -aA 2 'panicked at' "$fresh.log" || true
        tail -n 40 "$fresh.log"
        input=$(sed -n 's/.*Test unit written to //p' "$fresh.log" | tail -n 1)
        grep -aE '^Base64:' "$fresh.log" || true
        echo "fuzz: $target FAILED; again with: $build/$triple/$profile/$target ${input:-fuzz/artifacts/$target/INPUT}"
    fi
done
echo "test result: $( ((failed == 0)) && echo ok || echo FAILED). $passed passed; $failed failed; 0 ignored;"
((failed == 0))
