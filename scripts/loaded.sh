#!/usr/bin/env bash
# loaded.sh COMMAND...: runs COMMAND beside four busy loops, as on a machine that has too much to do. Its status is the command's.
set -uo pipefail
loops=()
trap 'kill "${loops[@]}" 2>/dev/null' EXIT
for _ in 1 2 3 4; do
    # A loop that outlives this script would slow the machine down for ever.
    (while kill -0 $$ 2>/dev/null; do for ((i = 0; i < 1000000; i++)); do :; done; done) &
    loops+=($!)
done
"$@"
