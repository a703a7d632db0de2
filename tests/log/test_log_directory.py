# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a log directory; logs that are there are kept, by number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebalance_megatron.log.files import LogDirectory, LogDirectoryError

HOLDER = """
import os, sys, time
from sparsebalance_megatron.log.files import LogDirectory
held = LogDirectory(sys.argv[1])
held.make(claim=True)
# Saving a checkpoint asynchronously forks; the child may outlive the run.
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
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
        LogDirectory(tmp_path).make(claim=True)
        os.kill(child, signal.SIGKILL)


def test_a_process_may_begin_again_where_it_began_before(tmp_path: Path) -> None:
    first = LogDirectory(tmp_path)
    first.make(claim=True)
    LogDirectory(tmp_path).make(claim=True)


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
