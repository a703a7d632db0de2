# SPDX-License-Identifier: Apache-2.0
"""Runs cases of bad input as a user would meet them, and counts how they end.

``PYTHONPATH=tests:. python tests/bad_inputs/survey.py [--only TEXT]``. Each case is a process of
its own, forked from one that has imported the package, in a folder of its own.

Verdicts: ``fine``; ``traceback``; ``hang``, more than the limits of computing or waiting;
``silent``, status 0 for what should be refused or noted; ``unclear``, a refusal that does not name
its reason in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bad_inputs.survey_cases import NO_OUTPUTS, TARGET, Case, all_cases, whole_folder

from sparsebalance_megatron import cli

MAX_CPU_S, MAX_WAIT_S = 20, 180.0
MAX_BYTES = 3 * 2**29
LINE = "sparse-balance: error: "
VERDICTS = ("fine", "traceback", "hang", "silent", "unclear")


@dataclass(frozen=True)
class End:
    status: int | None
    out: str
    err: str
    seconds: float


def run_case(case: Case, source: Path, keep: Path) -> End:
    """The end of a case in a process of its own; status None where it took too long."""
    shutil.copytree(source, keep, symlinks=True)
    outputs = [keep.parent / name for name in ("stdout", "stderr")]
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            _child(case, keep, outputs)
        finally:
            os._exit(99)
    status: int | None = None
    while time.monotonic() - began < MAX_WAIT_S:
        done, wait_status = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(wait_status)
            break
        time.sleep(0.005)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    out, err = (path.read_bytes().decode(errors="replace") for path in outputs)
    if status == -signal.SIGXCPU:
        status = None
    shutil.rmtree(keep, ignore_errors=True)
    return End(status, out, err, time.monotonic() - began)


def _child(case: Case, folder: Path, outputs: Sequence[Path]) -> None:
    """Runs a case as the interpreter would run the console script, and ends this process."""
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 5))
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MAX_BYTES,) * 2)
    words = list(case.words)
    if case.output:
        target = NO_OUTPUTS[case.output](folder)
        words = [word.replace(TARGET, target) for word in words]
    case.prepare()
    for name, value in case.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = None
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    files = {0: os.open(os.devnull, os.O_RDONLY)}
    for number, path in zip((1, 2), outputs, strict=True):
        files[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in files.items():
        os.dup2(file, number)
    for number in (0, 1, 2):
        match case.streams.get(number):
            case "closed":
                os.close(number)
            case "broken":
                reader, writer = os.pipe()
                os.close(reader)
                os.dup2(writer, number)
            case str(path):
                os.dup2(os.open(path, os.O_WRONLY), number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            raw = io.FileIO(number, "w" if number else "r", closefd=False)
        except OSError:
            stream = None
        else:
            wrapped = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
            policy = "backslashreplace" if number == 2 else errors or "strict"
            stream = io.TextIOWrapper(wrapped, encoding, policy, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code: Any = 0
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
        code = 1
    # As the interpreter does when it ends.
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exception as error:
        with contextlib.suppress(Exception):
            print(f"Exception ignored in: sys.stdout\nTraceback: {error!r}", file=sys.stderr)
        code = 120
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def verdict(case: Case, end: End) -> str:
    if "Traceback" in end.err or "Traceback" in end.out or "Exception ignored" in end.err:
        return "traceback"
    if end.status is None:
        return "hang"
    if end.status < 0 or end.status in (1, 99, 120):
        return "traceback"
    said = end.out + end.err
    match case.expects:
        case "any":
            return "fine"
        case "ends well":
            return "fine" if end.status == 0 else "unclear"
        case "lost output":
            lost = end.status in (2, 141)
            silent = 2 not in case.streams and end.status == 2 and not end.err.strip()
            return "fine" if lost and not silent else "silent"
        case "noted":
            if all(name in said for name in case.names):
                return "fine"
            return "silent" if end.status == 0 else "unclear"
    if end.status == 0:
        return "silent"
    lines = [line for line in end.err.splitlines() if line.strip()]
    if not lines or len(lines[-1]) > 1200 or "error: " not in lines[-1]:
        return "unclear"
    if lines[0].startswith(LINE) and len(lines) > 1:
        return "unclear"
    return "fine" if all(name in lines[-1] for name in case.names) else "unclear"


def survey(only: str = "", shown: bool = False) -> dict[str, Counter[str]]:
    """Group -> verdicts; what is not fine is printed."""
    os.environ.pop("COLUMNS", None)
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "source")
        source.mkdir()
        whole_folder(source)
        for number, case in enumerate(all_cases(source)):
            if only not in f"{case.group}: {case.name}":
                continue
            end = run_case(case, source, Path(directory, f"case-{number}"))
            judged = verdict(case, end)
            found.setdefault(case.group, Counter())[judged] += 1
            if judged != "fine" or shown:
                lines = (end.err.strip() or end.out.strip()).splitlines()[-1:]
                print(f"{judged}: {case.group}: {case.name}: status {end.status}, "
                      f"{end.seconds:.1f} s: {''.join(lines)[:300]}", flush=True)  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has it")
    parser.add_argument("--shown", action="store_true", help="print what was fine, too")
    arguments = parser.parse_args()
    found = survey(arguments.only, arguments.shown)
    print(f"{'group':<16}{'cases':>7}" + "".join(f"{each:>11}" for each in VERDICTS))
    for group, counts in found.items():
        print(
            f"{group:<16}{counts.total():>7}" + "".join(f"{counts[each]:>11}" for each in VERDICTS)
        )
    return int(any(counts.total() != counts["fine"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
