#!/usr/bin/env bash
# Writes the manual pages that aren't of commands to a folder: pvblk.toml(5), pvblk-volumes(7), pvblk(7). Their texts are the reference's.
#
#   scripts/man.sh OUT DATE
set -euo pipefail
out=$(realpath "$1")
date=$2
cd "$(dirname "$0")/.."

# page TITLE SECTION: Markdown on standard input becomes a page. mandoc and man's index want the name of a section on the line of the macro
# and no paragraph after it; the first line says that there are tables, lines are as long as their words, and a font that is only in troff
# becomes bold.
page() {
    {
        printf "'\\\\\" t\n"
        lowdown -s -tman --nroff-nolinks -M title="$1" -M section="$2" -M date="$date" -M source=pvblk -M volume=pvblk
    } | sed -E -e '/^\.S[HS]$/{N;s/\n/ /;n;/^\.[LP]P$/d}' -e 's/^\.TH .*/&\n.ad l\n.nh/' | sed 's/\\fC/\\fB/g' >"$out/$1.$2"
}

# reference FILE TITLE SECTION SENTENCE: a page of the reference, with the name that manual pages have first.
reference() {
    { printf '# NAME\n\n%s - %s\n\n# DESCRIPTION\n' "$2" "$4"; sed -E -e 1d -e '/^<!--/d' "$1"; } | page "$2" "$3"
}

reference docs/reference/configuration.md pvblk.toml 5 'what pvblk serve serves, in a file'
reference docs/reference/volumes.md pvblk-volumes 7 'what stores the blocks of a disk of pvblk'
page pvblk 7 <dist/man/pvblk.7.md
