#!/usr/bin/env bash
# The runner that test.sh gives to cargo, so that one build serves all of its lanes. `lane.sh LANE PROGRAM ARGUMENT…` runs the programs of that
# lane and no others: `kernels` those of tests/e2e that boot kernels of their own or measure for long, `e2e` the rest of tests/e2e, `others` all
# others. Cargo starts it in the folder of the program's package.
set -euo pipefail
lane=$1
shift
program=${1##*/}
# Without the hash that cargo adds.
case $PWD:${program%-*} in
*/tests/e2e:xen | */tests/e2e:raid5_kernel | */tests/e2e:lab) of=kernels ;;
*/tests/e2e:*) of=e2e ;;
*) of=others ;;
esac
if [ "$of" = "$lane" ]; then exec "$@"; fi
