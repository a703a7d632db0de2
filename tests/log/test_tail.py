# SPDX-License-Identifier: Apache-2.0
"""The end of a log as it grows: whole lines only, renamed files, resumed and fresh runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron.log import reader
from sparsebalance_megatron.log.reader import read_hosts, read_log_tail, read_run_log
from sparsebalance_megatron.log.records import encode

RUN = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=6)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The whole log, line by line; the first is its header."""
    directory = RUN.write(tmp_path_factory.mktemp("run"))
    return (directory / "steps.jsonl").read_bytes().splitlines(keepends=True)


def iterations(directory: Path) -> list[int]:
    return [record.iteration for record in read_log_tail(directory).steps]


def test_every_cut_of_every_line_waits_for_its_end(tmp_path: Path, lines: list[bytes]) -> None:
    """A disk may show any part of what was written; no part of a line is ever a line."""
    whole = b""
    for line in lines:
        (tmp_path / "steps.jsonl").write_bytes(whole)
        before = iterations(tmp_path)
        for cut in (len(line) // 3, len(line) - 1):
            (tmp_path / "steps.jsonl").write_bytes(whole + line[:cut])
            assert iterations(tmp_path) == before
        whole += line
    (tmp_path / "steps.jsonl").write_bytes(whole)
    tail = read_log_tail(tmp_path)
    assert [*map(encode, tail.steps)] == [*map(encode, read_run_log(tmp_path).steps)]
    assert (tail.damaged, tail.size_bytes) == (0, len(whole))


def test_of_a_long_log_the_last_whole_lines_are_read(
    tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b"".join(lines))
    monkeypatch.setattr(reader, "_TAIL_BYTES", sum(map(len, lines[-3:])) + 1)
    tail = read_log_tail(tmp_path)
    assert [each.iteration for each in tail.steps] == [4, 5, 6] and not tail.damaged


def test_a_log_that_outgrew_its_file_is_read_from_the_next(
    tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(lines[:4]))
    os.replace(path, tmp_path / "steps.1.jsonl")
    path.write_bytes(lines[0] + b"".join(lines[5:]))
    assert iterations(tmp_path)[-1] == 6


def test_steps_that_run_again_replace_what_came_after(tmp_path: Path, lines: list[bytes]) -> None:
    steps = [line for line in lines if json.loads(line)["type"] == "step"]
    (tmp_path / "steps.jsonl").write_bytes(lines[0] + b"".join(steps) + lines[0] + steps[2])
    assert iterations(tmp_path) == [1, 2, 3]


def test_damaged_lines_are_counted(tmp_path: Path, lines: list[bytes]) -> None:
    (tmp_path / "steps.jsonl").write_bytes(lines[0] + b"{broken\n\n[1]\n" + lines[1])
    assert read_log_tail(tmp_path).damaged == 2
    assert iterations(tmp_path) == [1]


def test_hosts_come_from_the_first_lines_of_the_ranks(tmp_path: Path) -> None:
    paths = [RUN.write(tmp_path) / "ranks" / f"rank-0000{number}.jsonl" for number in range(4)]
    assert set(read_hosts(tmp_path).values()) == {"node0", "node1"}
    paths[0].write_text('{"type": "ra')
    paths[1].write_text(paths[1].read_text().replace('"node0"', '""'))
    paths[2].unlink()
    assert len(read_hosts(tmp_path)) == 1
