# SPDX-License-Identifier: Apache-2.0
"""The rule for bad input, and how it is judged.

Bad input is refused: one line that names the thing, the place and the remedy, status 2 where a
command was given, soon, in little memory, with nothing left behind. What looks bad and is accepted
stands in a table of its own, with the reason.
"""

import resource
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

# Slow to import: before the time of a case is taken.
import sparsebalance_megatron.convert.transfer
import sparsebalance_megatron.profile.profile
import sparsebalance_megatron.view.report.run_report  # noqa: F401
from sparsebalance_megatron import cli

MAX_CPU_S, MAX_WAIT_S, MAX_MEGABYTES = 20.0, 180.0, 600.0
"""The wait is for what does not end and does not compute, such as reading a pipe."""
LINE = "sparse-balance: error: "
_LONGEST_LINE = 1200


class TooLongError(Exception):
    """Bad input was not refused in time."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if what is inside takes too long, or takes much more memory than there was."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {MAX_CPU_S} s of computing, or {MAX_WAIT_S} s of waiting")

    before = _peak_megabytes()
    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, MAX_CPU_S),
        (signal.SIGALRM, signal.ITIMER_REAL, MAX_WAIT_S),
    )
    previous = [signal.signal(number, stop) for number, _, _ in limits]
    for _, timer, limit_s in limits:
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(limits, previous, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)
    assert _peak_megabytes() - before < MAX_MEGABYTES


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Fail if files appear below a folder, vanish or change."""
    before = _contents(folder)
    yield
    assert _contents(folder) == before


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of change; of folders only that they are there."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {
        name: (0, 0) if stat.S_ISDIR(each.st_mode) else (each.st_size, each.st_mtime_ns)
        for name, each in found.items()
    }


def check_line(line: str, names: Sequence[str]) -> None:
    """Whether a refusal is one line of bounded length with all ``names``."""
    assert "\n" not in line.strip(), line
    assert len(line) < _LONGEST_LINE, len(line)
    assert "Traceback" not in line
    missing = [name for name in names if name not in line]
    assert missing == [], line


def check_refused(
    work: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...], *names: str
) -> None:
    """Whether ``work`` ends in an error of this package that :func:`check_line` accepts."""
    with bounded(), pytest.raises(error) as caught:
        work()
    assert type(caught.value).__module__.startswith("sparsebalance_megatron."), caught.value
    check_line(str(caught.value), names)


def check_command(
    words: Sequence[str], capsys: pytest.CaptureFixture[str], folder: Path, *names: str
) -> None:
    """Whether ``sparse-balance WORDS...`` ends with status 2 and one line, and leaves no file.

    argparse prints how the command is used before its line.
    """
    with bounded(), untouched(folder):
        try:
            status = cli.main(words)
            usage = False
        except SystemExit as end:
            status, usage = end.code, True
    error = capsys.readouterr().err
    assert status == 2, (status, error[-2000:])
    lines = [line for line in error.splitlines() if line.strip()]
    line = lines[-1]
    if usage:
        assert lines[0].startswith("usage: ") and ": error: " in line
    else:
        assert line.startswith(LINE), error[-2000:]
        assert sum(each.startswith(LINE) for each in lines) == 1
    assert "Traceback" not in error
    check_line(line, names)
