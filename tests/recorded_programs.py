# SPDX-License-Identifier: Apache-2.0
"""Programs that stand in for others on PATH and write down how scripts call them."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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


def run_bash(
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    exit_code: int = 0,
) -> str:
    """What ``bash WORDS...`` prints in ``folder``, where programs of ``bin`` come first; fails with
    its end at another exit code."""
    done = subprocess.run(
        ["bash", *words],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == exit_code, f"{words}\n{done.stdout[-4000:]}"
    return done.stdout
