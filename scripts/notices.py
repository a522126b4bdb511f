#!/usr/bin/env python3
"""Prints the licences of the crates that are linked into the program: scripts/notices.py >FILE

Their texts are those in the crates' own archives, as Cargo.lock pins them; a text that several crates share is printed once.
"""

import json
import os
import re
import subprocess
import sys

TEXT = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicen[cs]e)", re.IGNORECASE)


def cargo(*args):
    return subprocess.run(
        ["cargo", *args], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def linked():
    """Names and versions of the crates that end up in the program."""
    edges = "no-dev,no-build,no-proc-macro"
    tree = cargo("tree", "--locked", "--package", "pvblk", "--edges", edges, "--prefix", "none", "--format", "{p}")
    lines = tree.splitlines()
    words = (line.split() for line in lines if line)
    return {(name, version.lstrip("v")) for name, version, *_ in words}


def texts(folder):
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if TEXT.match(name) and os.path.isfile(path) and not name.endswith((".rs", ".toml")):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield file.read().replace("\r\n", "\n").strip()


def main():
    wanted = linked()
    version = subprocess.run(["rustc", "-vV"], check=True, stdout=subprocess.PIPE, text=True).stdout
    host = re.search(r"^host: (.*)$", version, re.MULTILINE).group(1)
    metadata = cargo("metadata", "--locked", "--filter-platform", host, "--format-version", "1")
    packages = json.loads(metadata)["packages"]
    crates, shared = [], {}
    for package in sorted(packages, key=lambda p: (p["name"], p["version"])):
        if package["source"] is None or (package["name"], package["version"]) not in wanted:
            continue
        title = f"{package['name']} {package['version']}"
        crates.append(f"{title}: {package['license']}")
        for text in texts(os.path.dirname(package["manifest_path"])):
            shared.setdefault(text, []).append(title)
    print("Crates of others that are part of pvblk, each with its licence. Where there is a choice, any of them may be taken.\n")
    print("\n".join([*crates, "the standard library of Rust: MIT OR Apache-2.0"]))
    for text, users in sorted(shared.items(), key=lambda item: item[1]):
        print(f"\n{'-' * 78}\n{', '.join(users)}\n\n{text}")


if __name__ == "__main__":
    sys.exit(main())
