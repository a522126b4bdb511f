#!/usr/bin/env bash
# The runner that test.sh gives to cargo, so that one build serves all of its lanes. `lane.sh LANE PROGRAM ARGUMENT…` runs the programs of that
# lane and no others: `waiting` those of tests/e2e that take longest and wait for nearly all of it, `e2e` the rest of tests/e2e, `others` all
# others. Cargo starts it in the folder of the program's package.
set -euo pipefail
lane=$1
shift
program=${1##*/}
# Without the hash that cargo adds.
case $PWD:${program%-*} in
*/tests/e2e:raid5_net | */tests/e2e:raid5_life | */tests/e2e:ceph | */tests/e2e:reconnect | */tests/e2e:packages) of=waiting ;;
*/tests/e2e:*) of=e2e ;;
*) of=others ;;
esac
if [ "$of" = "$lane" ]; then exec "$@"; fi
