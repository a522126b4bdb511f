#!/usr/bin/env bash
# repeat.sh RUNS [PATTERN]: runs each test program of the workspace RUNS times, and prints a table. Simulations, models and the
# checks of the tree are left out: no thread and no clock of the machine takes part in them. End-to-end tests have PATTERN
# `e2e`, and need the release build. Logs of runs that failed are kept in target/repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=$1 pattern=${2:-}
target=${CARGO_TARGET_DIR:-target}
kept=$target/repeat
rm -rf "$kept"
mkdir -p "$kept"

case $pattern in
e2e) which=(-p pvblk-e2e) pattern= ;;
*) which=(--workspace --exclude pvblk-e2e --exclude pvblk-sim --exclude pvblk-raid5-model --exclude pvblk-house) ;;
esac
# Name, program and package directory of each test program.
mapfile -t programs < <(
    cargo test "${which[@]}" --locked --no-run --message-format=json 2>/dev/null | python3 -c '
import json, os, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("profile", {}).get("test") and m.get("executable"):
        folder = os.path.dirname(m["manifest_path"])
        kind = m["target"]["kind"][0]
        name = m["target"]["name"] if kind == "test" else kind
        if name != "loom":
            print(os.path.basename(folder) + "/" + name, m["executable"], folder)
'
)
((${#programs[@]} > 0)) || { echo "repeat.sh: nothing was built: run 'cargo test --no-run' to see why" >&2; exit 1; }

bad=0 all=0 begin=$SECONDS
printf '%-32s %5s %7s %7s %8s\n' program runs tests failed 's/run'
for line in "${programs[@]}"; do
    read -r name program folder <<<"$line"
    [[ $name == *$pattern* ]] || continue
    first=$SECONDS failed=0 tests=0
    for ((run = 1; run <= runs; run++)); do
        log=$kept/${name//\//-}-$run.log
        if (cd "$folder" && timeout 600 "$program") >"$log" 2>&1; then
            n=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
            tests=$((tests + ${n:-0}))
            rm "$log"
        else
            failed=$((failed + 1))
        fi
    done
    printf '%-32s %5d %7d %7d %8.1f\n' "$name" "$runs" "$tests" "$failed" "$(awk "BEGIN { print ($SECONDS - $first) / $runs }")"
    bad=$((bad + failed)) all=$((all + tests))
done
printf '%d tests passed, %d runs of a program failed, %d s\n' "$all" "$bad" $((SECONDS - begin))
((bad == 0))
