# SPDX-License-Identifier: Apache-2.0
"""The writing thread: it never holds up its owner, and is done when the process ends."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparsebalance_megatron.log.log_file import BackgroundLog, JsonLinesFile
from sparsebalance_megatron.log.records import Header, Record


class Line(Record):
    number: int


PREAMBLE = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from sparsebalance_megatron.log.log_file import BackgroundLog, JsonLinesFile
from sparsebalance_megatron.log.records import Header, Record

class Line(Record):
    number: int
    text: str

log = BackgroundLog(JsonLinesFile(sys.argv[1]), ThreadPoolExecutor(1))
log.begin(Header(), resumed=False)

def append(number):
    log.append(lambda: Line(number=number, text="x" * 2000))
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + program, str(path)],
        stderr=subprocess.PIPE,
        text=True,
    )


def numbers(path: Path) -> list[int]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line)["number"] for line in text.splitlines()[1:]]


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError"])
def test_what_is_queued_is_written_when_the_process_ends(tmp_path: Path, end: str) -> None:
    path = tmp_path / "log.jsonl"
    process = start(f"for number in range(40): append(number)\n{end}", path)
    process.communicate(timeout=120)
    assert numbers(path) == list(range(40))


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    process = start("number = 0\nwhile True: append(number); number += 1; time.sleep(1e-4)", path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 10**5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    found = numbers(path)
    assert len(found) > 20
    assert found == sorted(found)


def test_a_forked_process_writes_nothing_again(tmp_path: Path) -> None:
    """Saving a checkpoint asynchronously forks; the child may end like any other process."""
    path = tmp_path / "log.jsonl"
    program = """
for number in range(20): append(number)
child = os.fork()
if child == 0:
    append(-1)
    sys.exit(0)
os.waitpid(child, 0)
for number in range(20, 40): append(number)
"""
    process = start(program, path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert numbers(path) == list(range(40))


def test_a_full_queue_drops_lines_and_the_next_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as worker:
        log = BackgroundLog(JsonLinesFile(tmp_path / "log.jsonl"), worker, max_queued=3)
        disk = threading.Event()
        worker.submit(disk.wait)
        log.begin(Header(), resumed=False)
        with caplog.at_level(logging.WARNING):
            for number in range(5):
                log.append(lambda number=number: Line(number=number))
        disk.set()
        assert len(caplog.records) == 1
        worker.submit(lambda: None).result()
        log.append(lambda: Line(number=5))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.get("number") for line in lines] == [None, 0, 1, 5]
    # The first two were made after three had been given up.
    assert [line.get("lines_dropped") for line in lines] == [None, 3, None, None]


def test_a_line_that_cannot_be_made_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), ThreadPoolExecutor(1) as worker:
        log = BackgroundLog(JsonLinesFile(tmp_path / "log.jsonl"), worker)
        log.begin(Header(), resumed=False)
        log.append(lambda: Line(number=1 // 0))
        log.append(lambda: Line(number=1))
    assert "ZeroDivisionError" in caplog.text
    assert numbers(tmp_path / "log.jsonl") == [1]
