# SPDX-License-Identifier: Apache-2.0
"""Programs that stand in for others on PATH and write down how they were called."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

RECORDER = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([[{name!r}, *sys.argv[1:]], dict(os.environ)]) + "\\n")
"""


def record(folder: Path, names: Iterable[str]) -> None:
    """Make programs of these names, or paths, in a folder, and forget earlier calls."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "calls.jsonl"
    log.write_text("")
    for name in names:
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(
            RECORDER.format(python=sys.executable, log=str(log), name=name.removeprefix("bin/"))
        )
        program.chmod(0o755)


def recorded(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """(words, environment) of every call since, in order."""
    lines = (folder / "calls.jsonl").read_text().splitlines()
    return [(words, environment) for words, environment in map(json.loads, lines)]
