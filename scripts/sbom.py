#!/usr/bin/env python3
"""Prints a bill of materials without what names the machine that made it: scripts/sbom.py BOM.json FOLDER

FOLDER is where the source was. The time is $SOURCE_DATE_EPOCH's, and the serial number is that of the source's Cargo.lock.
"""

import json
import os
import sys
import uuid
from datetime import datetime, timezone


def main():
    path, folder = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        bom = json.loads(file.read().replace(os.path.dirname(os.path.realpath(folder)), ""))
    with open(os.path.join(folder, "Cargo.lock"), encoding="utf-8") as file:
        lock = file.read()
    time = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    bom["metadata"]["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    bom["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, lock).urn
    bom["components"].sort(key=lambda c: c["bom-ref"])
    bom["dependencies"].sort(key=lambda d: d["ref"])
    json.dump(bom, sys.stdout, indent=2, ensure_ascii=False)
    print()


if __name__ == "__main__":
    sys.exit(main())
