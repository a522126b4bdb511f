#!/usr/bin/env bash
# The checks of `make test`, once the tools are installed. All steps run even if one fails;
# the last line is the sum, and the status is non-zero if anything failed.
# The build of the tests comes first. Then the lane `others` begins, whose output follows when all have ended; beside it the command is built, and the
# end-to-end tests, which mostly wait, run in the lane `e2e`. A third lane, for those that wait longest, made the whole no faster on two CPUs.
# `test.sh build` only builds what the checks run, so that a run beside busy loops measures tests and not the compiler.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/sbin:/sbin"

# Seconds for all fuzz targets together; `make fuzz` runs longer.
: "${FUZZ_SECONDS:=60}"

if [ "${1:-}" = build ]; then
    set -e
    cargo clippy --quiet --workspace --all-targets --locked -- -D warnings
    cargo test --quiet --workspace --locked --no-run
    cargo clippy --quiet -p pvblk-sim --features planted --all-targets --locked -- -D warnings
    if scripts/asan.sh has 2>/dev/null; then
        scripts/asan.sh test --no-run
    else
        cargo test --quiet -p pvblk-sim --features planted --locked --no-run
    fi
    scripts/fuzz.sh build
    cargo build --quiet --release --locked -p pvblk
    exit
fi

logs=$(mktemp -d)
lane=e2e
# The process group of the lane beside this one.
beside=
trap '[ -z "$beside" ] || kill -- "-$beside" 2>/dev/null; rm -rf "$logs"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

passed=0 failed=0 skipped=0
failures=() skips=()

# Runs a command, and shows its output, which is also kept in $logs/LANE.log. Returns its status.
run() {
    local name=$1 begin=$SECONDS status
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$logs/$lane.log"
    status=${PIPESTATUS[0]}
    printf '== %s: %s, %d s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo "FAILED ($status)")" $((SECONDS - begin))
    return "$status"
}

# Keeps the end of the last step's log for the summary, and after it the reasons of the first failed tests, where a cut-off record still shows
# them.
keep_log() {
    printf '\n-- %s\n' "$1" >>"$logs/failures"
    tail -n 12 "$logs/$lane.log" >>"$logs/failures"
    # A failed test's output follows `---- NAME ----`.
    grep -nE -A 8 '^---- |panicked at|^error(\[|:)|SUMMARY|^fuzz: .* FAILED' "$logs/$lane.log" | cut -c 1-300 | head -n 60 >>"$logs/failures"
}

fail() {
    failed=$((failed + 1))
    failures+=("$1")
    keep_log "$1"
}

skip() {
    skipped=$((skipped + 1))
    skips+=("$1")
    printf '\n== %s: skipped\n' "$1"
}

# A step that is one check.
check() {
    if run "$@"; then passed=$((passed + 1)); else fail "$1"; fi
}

# Names of the tests that failed in this step: those of the list before each `test result:`, and fuzz targets.
failed_names() {
    awk '
        /^failures:$/ { n = 0; on = 1; next }
        /test result:/ { for (i = 0; i < n; i++) print list[i]; n = 0; on = 0 }
        on && /^    [^ ]/ { list[n++] = substr($0, 5) }
        /^fuzz: .* FAILED;/ { print $2 }' "$logs/$lane.log"
}

# Number of test programs of which cargo says that they failed, and that printed no result.
dead_programs() {
    awk '
        /^error: [0-9]+ targets? failed:/ { said = $2 }
        / *test result: FAILED/ { told++ }
        END { print said - told }' "$logs/$lane.log"
}

# A step that prints `test result:` lines; each of its tests counts.
tests() {
    local name=$1 status=0 p f s dead
    run "$@" || status=$?
    read -r p f s < <(awk '
        / *test result: / {
            for (i = 2; i <= NF; i++) {
                if ($i == "passed;") p += $(i - 1)
                if ($i == "failed;") f += $(i - 1)
                if ($i == "ignored;") s += $(i - 1)
            }
        }
        END { print p + 0, f + 0, s + 0 }' "$logs/$lane.log")
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    while IFS= read -r line; do skips+=("$line"); done < <(sed -n 's/^test \(.*[^ ]\) *\.\.\. ignored/\1:/p' "$logs/$lane.log")
    if ((f > 0)); then
        failures+=("$name: $f failed: $(failed_names | head -n 20 | paste -sd ' ')")
        keep_log "$name"
        if ((status != 0)) && dead=$(dead_programs) && ((dead > 0)); then
            fail "$name: test programs that ended before their tests did: $dead"
        fi
    elif ((status != 0)); then
        # The step ended before its tests did: that is a failure without a line of its own.
        fail "$name (status $status)"
    elif ((p + s == 0)); then
        fail "$name: no test ran"
    fi
}

# Tests of the workspace that are this lane's, as lane.sh has it. Further words go to cargo.
lane_tests() {
    local name=$1 host
    host=$(rustc -vV | sed -n 's/^host: //p')
    tests "$name" cargo test --config "target.$host.runner = ['$PWD/scripts/lane.sh', '$lane']" --workspace --locked --no-fail-fast "${@:2}"
}

# The checks beside the end-to-end tests.
others() {
    # They come first, since they build nothing: a build would hold the lock of the target directory, for which `cargo test` of the other lane waits if it
    # begins meanwhile.
    # The rules of the tree (imports, unsafe, lengths, links) are tests of `pvblk-house`, the fuzz targets over their seeds those of `pvblk-fuzz`.
    lane_tests 'unit tests'
    check 'clippy' cargo clippy --workspace --all-targets --locked -- -D warnings
    check 'clippy, with planted bugs' cargo clippy -p pvblk-sim --features planted --all-targets --locked -- -D warnings
    if command -v cargo-deny >/dev/null 2>&1; then
        check 'licences, bans, sources' cargo deny --locked check --hide-inclusion-graph bans licenses sources
    else
        skip 'licences, bans, sources: cargo-deny is not installed'
    fi
    # The checkers must find the planted bugs. This is a build of its own, since no other may have them.
    if scripts/asan.sh has 2>/dev/null; then
        tests 'under AddressSanitizer, with planted bugs' scripts/asan.sh test
    else
        skip 'under AddressSanitizer: this toolchain has none'
        tests 'simulation, with planted bugs' cargo test -p pvblk-sim --features planted --locked --no-fail-fast
    fi
    tests "fuzzing, $FUZZ_SECONDS s" scripts/fuzz.sh "$FUZZ_SECONDS"
}

# Starts a lane, which is a function of this name, with its own account.
start_lane() {
    # In a process group of its own, so that nothing of it outlives this script.
    set -m
    (
        lane=$1
        passed=0 failed=0 skipped=0 failures=() skips=()
        trap - EXIT
        "$1"
        printf '%s\n' "${failures[@]}" >"$logs/$lane.failed"
        printf '%s\n' "${skips[@]}" >"$logs/$lane.skipped"
        printf '%d %d %d\n' "$passed" "$failed" "$skipped" >"$logs/$lane.sum"
    ) >"$logs/$1" 2>&1 </dev/null &
    beside=$!
    set +m
}

# Shows a lane's output until it has ended, and adds its account to this one's.
join_lane() {
    local lane=$1 p f s
    printf '\n== the lane %s\n' "$1"
    tail -n +1 -f "$logs/$1" --pid="$beside"
    wait "$beside"
    beside=
    if ! read -r p f s <"$logs/$1.sum"; then
        fail "the lane $1: it ended before its sum"
        return
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    while IFS= read -r line; do [ -z "$line" ] || failures+=("$line"); done <"$logs/$1.failed"
    while IFS= read -r line; do [ -z "$line" ] || skips+=("$line"); done <"$logs/$1.skipped"
}

check 'format' cargo fmt --all --check
can=true
run 'build of the tests' cargo test --workspace --locked --no-run || can=false

start_lane others
# The command is built on its own, as it is shipped; the lab and the examples are there since the step before. The last part of that
# build keeps one CPU busy, so tests run meanwhile.
run 'release build' cargo build --release --locked -p pvblk || can=false
if $can; then
    lane_tests 'end to end' --tests
else
    fail 'builds, and with them the end-to-end tests'
fi
join_lane others

printf '\n'
for text in "${skips[@]}"; do printf 'skipped: %s\n' "$text"; done
# After the skips: a record that keeps only the end still says why a test failed.
[ ! -f "$logs/failures" ] || cut -c 1-300 "$logs/failures"
for text in "${failures[@]}"; do printf 'FAILED: %s\n' "$text"; done
printf '%d s\n' "$SECONDS"
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
((failed == 0))
