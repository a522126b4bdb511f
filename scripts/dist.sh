#!/usr/bin/env bash
# Makes the files of a release from the last commit and a program that is built from it: decision 46.
#
#   scripts/dist.sh PROGRAM OUT
#
# OUT, which is made anew, gets the source, the program with what belongs to it, the Debian package, the bill of materials, and SHA256SUMS. The same
# commit and the same program make the same bytes. Changes that are not committed stop it; PVBLK_DIST_DIRTY=1 leaves them out of the source instead.
set -euo pipefail
program=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 TZ=UTC
umask 022

fail() {
    printf 'dist: %s\n' "$*" >&2
    exit 1
}
git rev-parse --verify -q HEAD >/dev/null || fail 'a release is made in a repository: clone it'
[ -z "$(git status --porcelain)" ] || [ "${PVBLK_DIST_DIRTY:-}" = 1 ] || fail 'there are changes that are not committed: commit them, or PVBLK_DIST_DIRTY=1 leaves them out'
command -v cargo-cyclonedx >/dev/null || fail 'cargo-cyclonedx is not installed: scripts/install-tools.sh dist installs it'
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
name=pvblk-$version
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
rm -rf "$out"
mkdir -p "$out"

# The source: files in the order of their names, with the time of the commit.
git archive --format=tar --prefix="$name/" HEAD | gzip -9n >"$out/$name.tar.gz"

# The bill of materials, of the source and its Cargo.lock; nothing in it names this machine.
tar -xzf "$out/$name.tar.gz" -C "$stage"
(cd "$stage/$name" && cargo cyclonedx --quiet --format json --spec-version 1.5 --manifest-path crates/pvblk/Cargo.toml --no-build-deps) >&2
python3 scripts/sbom.py "$stage/$name/crates/pvblk/pvblk.cdx.json" "$stage/$name" >"$out/$name.cdx.json"

# The package, and the same files for other systems.
deb=$(scripts/deb.sh "$program" "$out")
architecture=$(dpkg-deb -f "$deb" Architecture)
tree=$stage/$name-$architecture
dpkg-deb -x "$deb" "$tree"
# Where /lib is a link to /usr/lib, tar would put a folder in its place.
mkdir -p "$tree/usr/lib"
cp -a "$tree/lib/." "$tree/usr/lib/"
rm -r "$tree/lib"
install -m 644 LICENSE-APACHE LICENSE-MIT -t "$tree/usr/share/doc/pvblk"
tar -C "$stage" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --mode=u+rwX,go=rX -cf - "$name-$architecture" |
    gzip -9n >"$out/$name-$architecture.tar.gz"

(cd "$out" && sha256sum -- * >"$stage/sums" && mv "$stage/sums" SHA256SUMS)
ls -l "$out"
