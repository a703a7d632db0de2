# SPDX-License-Identifier: Apache-2.0
"""Writes the sources of this Python's standard library as JSON lines for `prepare-data --input`.

    python stdlib_documents.py FILE

A corpus with a long tail that every machine has: about 1,700 documents in the order of their paths.
Files that are empty, or not UTF-8, are left out.
"""

import json
import sys
import sysconfig
from pathlib import Path

ROOT = Path(sysconfig.get_path("stdlib"))
output = Path(sys.argv[1])
output.parent.mkdir(parents=True, exist_ok=True)
with output.open("w") as stream:
    for path in sorted(ROOT.rglob("*.py")):
        raw = path.read_bytes()
        if raw and not {"site-packages", "dist-packages"} & set(path.relative_to(ROOT).parts):
            try:
                stream.write(json.dumps({"text": raw.decode()}) + "\n")
            except UnicodeDecodeError:
                print(f"{path}: not UTF-8, left out", file=sys.stderr)
