#!/usr/bin/env bash
# Makes the Debian package of a program that is built already: decision 42.
#
#   scripts/deb.sh PROGRAM OUT
#
# The same tree and the same program make the same bytes: times are those of the last commit, or of SOURCE_DATE_EPOCH.
set -euo pipefail
program=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 PVBLK_CONTROL=none
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
# The program keeps its debugging information in target/, and the package has none.
export DEB_BUILD_OPTIONS="${DEB_BUILD_OPTIONS:-noautodbgsym}"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
tree=$stage/pvblk
mkdir -p "$tree/pages"
cp -r README.md CHANGELOG.md docs dist "$tree"
mv "$tree/dist/debian" "$tree/debian"
cp dist/systemd/pvblk.service dist/systemd/pvblk@.service "$tree/debian"
cp dist/systemd/pvblk.sysusers "$tree/debian"
install -m 755 "$program" "$tree/pvblk"
scripts/notices.py >"$tree/third-party-notices.txt"

day=$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)
"$program" manual --date "$day" "$tree/pages"
mv "$tree/pages/bash/pvblk.bash" "$tree/pages/bash/pvblk"
scripts/man.sh "$tree/pages/man" "$day"

maintainer=$(sed -n 's/^Maintainer: //p' dist/debian/control)
cat >"$tree/debian/changelog" <<END
pvblk ($version) unstable; urgency=medium

  * See changelog.gz.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
END

# Without build dependencies: Rust comes from rustup.
(cd "$tree" && dpkg-buildpackage --build=binary --no-sign --no-check-builddeps) >"$stage/log" 2>&1 || {
    cat "$stage/log" >&2
    exit 1
}
cp "$stage"/pvblk_*.deb "$out"
ls "$out"/pvblk_"$version"_*.deb
