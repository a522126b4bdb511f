#!/usr/bin/env bash
# The runner that test.sh gives to cargo, so that one build serves both of its lanes. `lane.sh e2e PROGRAM ARGUMENT…` runs programs of
# tests/e2e and no others, `lane.sh others PROGRAM ARGUMENT…` all others, and tests of documentation. Cargo starts it in the folder of the
# program's package.
set -euo pipefail
lane=$1
shift
case $PWD:${1##*/} in
# A test of documentation, which has no name of its own.
*:rust_out) of=others ;;
*/tests/e2e:*) of=e2e ;;
*) of=others ;;
esac
if [ "$of" = "$lane" ]; then exec "$@"; fi
