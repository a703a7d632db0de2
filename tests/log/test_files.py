# SPDX-License-Identifier: Apache-2.0
"""Log files and their directory: whole lines, bounded size, a full disk, one run at a time."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsebalance_megatron.log.files import LogDirectory, LogDirectoryError, LogWriter
from sparsebalance_megatron.log.records import LOG_FORMAT, Header, Record


class FirstLine(Header, tag="run"):
    number: int = -1


class Line(Record, tag="line", omit_defaults=True):
    number: int | None = None
    text: str = ""


HEADER = FirstLine()
WRITTEN_HEADER = {"type": "run", "log_format": LOG_FORMAT, "number": -1}


def records(path: Path) -> list[dict[str, Any]]:
    """Every line of a file; fails on one that is cut off."""
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, *lines: Line) -> None:
    """All that one process writes."""
    log = LogWriter(path, HEADER)
    for line in lines:
        log.append(lambda line=line: line)
        log.flush()
    log.close()


def test_a_resumed_run_appends_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "log.jsonl"
    write(path, Line(number=0))
    with path.open("a") as stream:
        stream.write('{"cut o')
    write(path, Line(number=1))
    lines = path.read_text().splitlines()
    assert lines.pop(2) == '{"cut o'
    assert [json.loads(line)["number"] for line in lines] == [-1, 0, -1, 1]


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=60),
    resumptions=st.sets(st.integers(0, 60), max_size=3),
)
@example(sizes=[0, 0, 57, 150, 45, 150, 150], resumptions={0, 1, 4})
def test_size_is_bounded_and_every_line_kept_or_counted(
    sizes: list[int], resumptions: set[int]
) -> None:
    """The newest lines stay, in order and without gaps; headers count what is gone."""
    max_bytes = 1000
    with tempfile.TemporaryDirectory() as directory:
        path, older = Path(directory) / "log.jsonl", Path(directory) / "log.jsonl.1"
        log = LogWriter(path, HEADER, max_bytes=max_bytes)
        discarded = 0
        for number, size in enumerate(sizes):
            before = older.read_bytes() if older.exists() else b""
            if number in resumptions:
                log.close()
                log = LogWriter(path, HEADER, max_bytes=max_bytes)
            log.append(lambda number=number, size=size: Line(number=number, text="x" * size))
            log.flush()
            kept = records(older) + records(path)
            numbers = [record["number"] for record in kept if record["type"] == "line"]
            if older.exists() and older.read_bytes() != before:
                discarded += len([line for line in before.splitlines() if line])
            assert sum(p.stat().st_size for p in (path, older) if p.exists()) <= max_bytes
            assert numbers == list(range(number + 1 - len(numbers), number + 1))
            assert kept[0]["type"] == "run"
            assert records(path)[0].get("lines_discarded", 0) == discarded
        log.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: Line(text="x" * 300), "exceeds half"), (lambda: Line(number=1 // 0), "by zero")],
)
def test_a_line_that_cannot_be_made_or_is_too_long_is_counted(
    make: Callable[[], Line], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogWriter(tmp_path / "log.jsonl", HEADER, max_bytes=600)
    first, *others = (lambda number=number: Line(number=number) for number in range(3))
    with caplog.at_level(logging.WARNING):
        for each in (first, make, make, *others):
            log.append(each)
        log.close()
    assert records(tmp_path / "log.jsonl") == [
        WRITTEN_HEADER,
        {"type": "line", "number": 0},
        {"type": "line", "number": 1, "lines_dropped": 2},
        {"type": "line", "number": 2},
    ]
    (warning,) = caplog.records
    assert "log.jsonl" in warning.getMessage() and reason in warning.getMessage()


PREAMBLE = """
import logging, os, resource, sys
from sparsebalance_megatron.log.files import LogWriter
from sparsebalance_megatron.log.records import Header, Record

class Line(Record):
    number: int
    text: str

logging.basicConfig(format="WARNED %(message)s")
log = LogWriter(sys.argv[1], Header())

def append(number, text="x" * 2000):
    log.append(lambda: Line(number=number, text=text))
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + program, str(path)], stderr=subprocess.PIPE, text=True
    )


FULL_DISK = """
log.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(50):
    append(number, "x" * 90)
    log.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
append(50)
append(51)
"""


def test_a_full_disk_costs_one_warning_and_counted_lines(tmp_path: Path) -> None:
    """A limit on the file's size fails a write half-way, as a full disk does."""
    path = tmp_path / "log.jsonl"
    process = start(FULL_DISK, path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors.count("WARNED") == 1, errors
    # Without what was cut off.
    whole = [text for text in path.read_text().splitlines() if text.endswith("}")]
    lines = [json.loads(text) for text in whole]
    lines = [line for line in lines if "number" in line]
    written = [line["number"] for line in lines[:-2]]
    assert written == list(range(len(written)))
    assert 0 < len(written) < 50
    assert [line["number"] for line in lines[-2:]] == [50, 51]
    assert [line.get("lines_dropped") for line in lines[-2:]] == [50 - len(written), None]


def test_a_directory_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "file" / "log.jsonl", Line(number=0))
    assert len(caplog.records) == 1


FORKING = """
child = os.fork()
if child == 0:
    append(-1)
    sys.exit(0)
os.waitpid(child, 0)
for number in range(20, 40): append(number)
"""
"""As saving a checkpoint asynchronously does; the child may end like any other process."""


@pytest.mark.parametrize(
    ("end", "status", "written"),
    [("", 0, 20), ("sys.exit(3)", 3, 20), ("raise RuntimeError", 1, 20), (FORKING, 0, 40)],
)
def test_what_is_queued_is_written_once_when_the_process_ends(
    tmp_path: Path, end: str, status: int, written: int
) -> None:
    path = tmp_path / "log.jsonl"
    process = start(f"for number in range(20): append(number)\n{end}", path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert [record["number"] for record in records(path)[1:]] == list(range(written))


def test_a_full_queue_drops_lines_and_the_next_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogWriter(tmp_path / "log.jsonl", HEADER, max_queued=3)
    log.flush()
    disk, waits = threading.Event(), threading.Event()

    def slow() -> Line:
        waits.set()
        disk.wait()
        return Line(number=0)

    with caplog.at_level(logging.WARNING):
        log.append(slow)
        waits.wait()
        for number in range(1, 7):
            log.append(lambda number=number: Line(number=number))
    disk.set()
    log.flush()
    log.append(lambda: Line(number=7))
    log.close()
    assert len(caplog.records) == 1
    lines = records(tmp_path / "log.jsonl")[1:]
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 7]
    assert sum(line.get("lines_dropped", 0) for line in lines) == 3


HOLDER = """
import os, sys, time
from sparsebalance_megatron.log.files import LogDirectory
held = LogDirectory(sys.argv[1])
held.make(claim=True)
# Saving a checkpoint asynchronously forks; the child may outlive the run.
child = os.fork()
if child == 0:
    # What runs in a child after a fork has run here: the child has let the lock go.
    print(os.getpid(), flush=True)
    time.sleep(30)
    os._exit(0)
sys.stdin.read()
"""


def write_logs(directory: Path, text: str) -> None:
    (directory / "ranks").mkdir(parents=True, exist_ok=True)
    for name in ("steps.jsonl", "steps.jsonl.1", "ranks/rank-00000.jsonl"):
        (directory / name).write_text(text)


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        with pytest.raises(LogDirectoryError, match=rf"\(process {other.pid} on .*own"):
            LogDirectory(tmp_path).make(claim=True)
        LogDirectory(tmp_path).make(claim=False)
        other.kill()
        other.wait()
        # A process may begin again where it began before.
        again = [LogDirectory(tmp_path) for _ in range(2)]
        for directory in again:
            directory.make(claim=True)
        os.kill(child, signal.SIGKILL)


def test_earlier_logs_are_moved_by_number(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path)
    assert directory.number_for_earlier_logs() == 0
    for number, text in ((1, "first"), (2, "second")):
        write_logs(tmp_path, text)
        (tmp_path / "cost_table.json").write_text("not a log")
        assert directory.number_for_earlier_logs() == number
        directory.set_aside(number)
        assert LogDirectory(tmp_path).set_aside(number) == tmp_path / "earlier" / str(number)
    assert directory.number_for_earlier_logs() == 0
    for number, text in ((1, "first"), (2, "second")):
        kept = sorted((tmp_path / "earlier" / str(number)).rglob("*.jsonl*"))
        assert [path.name for path in kept] == ["rank-00000.jsonl", "steps.jsonl", "steps.jsonl.1"]
        assert {path.read_text() for path in kept} == {text}
    assert (tmp_path / "cost_table.json").exists()


def test_logs_that_cannot_be_moved_are_not_replaced(tmp_path: Path) -> None:
    write_logs(tmp_path, "old")
    (tmp_path / "earlier").write_text("a file")
    with pytest.raises(LogDirectoryError, match="earlier run's logs cannot be kept"):
        LogDirectory(tmp_path).set_aside(1)
    assert (tmp_path / "steps.jsonl").read_text() == "old"


@pytest.mark.parametrize("name", ["file", "file/below", "loop"])
def test_what_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    directory = LogDirectory(tmp_path / name)
    with pytest.raises(LogDirectoryError, match=r"--sparse-balance-log-dir .*name another"):
        directory.make(claim=True)
    with pytest.raises(LogDirectoryError, match="is not a directory; name another"):
        directory.check()


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    assert LogDirectory(tmp_path / "new" / "log").check() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody for a moment")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(LogDirectoryError, match=r"cannot be written \(Permission denied\)"):
            LogDirectory(tmp_path).make(claim=True)
    finally:
        os.seteuid(0)
