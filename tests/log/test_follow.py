# SPDX-License-Identifier: Apache-2.0
"""Following a log as it grows: whole lines only, renamed files, resumed and fresh runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron.log.follow import StepLogFollower, hosts_of
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.log.records import encode

RUN = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=6)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The whole log, line by line; the first is its header."""
    directory = RUN.write(tmp_path_factory.mktemp("run"))
    return (directory / "steps.jsonl").read_bytes().splitlines(keepends=True)


def iterations(follower: StepLogFollower) -> list[int]:
    return [record.iteration for record in follower.steps]


def test_every_cut_of_every_line_waits_for_its_end(tmp_path: Path, lines: list[bytes]) -> None:
    """A disk may show any part of what was written; no part of a line is ever a line."""
    path = tmp_path / "steps.jsonl"
    follower = StepLogFollower(tmp_path)
    path.touch()
    for line in lines:
        before = iterations(follower)
        for part in (line[: len(line) // 3], line[len(line) // 3 : -1]):
            with path.open("ab") as stream:
                stream.write(part)
            assert not follower.poll()
            assert iterations(follower) == before
        with path.open("ab") as stream:
            stream.write(line[-1:])
        follower.poll()
    assert iterations(follower) == [1, 2, 3, 4, 5, 6]
    assert follower.unreadable == 0


def test_what_is_followed_is_what_is_read_afterwards(tmp_path: Path, lines: list[bytes]) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b"".join(lines))
    follower = StepLogFollower(tmp_path)
    assert follower.poll()
    read = read_run_log(tmp_path)
    assert [*map(encode, follower.steps)] == [*map(encode, read.steps)]
    assert follower.header == read.header
    assert not follower.poll()


def test_a_log_that_outgrew_its_file_is_followed_into_the_next(
    tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(lines[:3]))
    follower = StepLogFollower(tmp_path)
    follower.poll()
    with path.open("ab") as stream:
        stream.write(lines[4])  # written after the last look, before the file was renamed
    os.replace(path, tmp_path / "steps.1.jsonl")
    assert follower.poll()
    path.write_bytes(lines[0] + b"".join(lines[5:]))
    assert follower.poll()
    known = [json.loads(line) for line in (*lines[:3], *lines[4:])]
    assert iterations(follower) == [each["iteration"] for each in known if each["type"] == "step"]


def test_steps_that_run_again_replace_what_came_after(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "steps.jsonl"
    steps = [line for line in lines if json.loads(line)["type"] == "step"]
    path.write_bytes(lines[0] + b"".join(steps))
    follower = StepLogFollower(tmp_path)
    follower.poll()
    with path.open("ab") as stream:
        stream.write(lines[0] + steps[2])
    assert follower.poll()
    assert iterations(follower) == [1, 2, 3]


def test_a_fresh_run_in_the_same_place_starts_over(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(lines))
    follower = StepLogFollower(tmp_path)
    follower.poll()
    path.rename(tmp_path / "moved.jsonl")
    path.write_bytes(b"".join(lines[:2]))
    assert follower.poll()
    assert iterations(follower) == [1]


def test_damaged_lines_are_counted(tmp_path: Path, lines: list[bytes]) -> None:
    (tmp_path / "steps.jsonl").write_bytes(lines[0] + b"{broken\n\n[1]\n" + lines[1])
    follower = StepLogFollower(tmp_path)
    assert follower.poll()
    assert follower.unreadable == 2


def test_hosts_come_from_the_first_lines_of_the_ranks(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    header: dict[str, Any] = {
        "type": "rank",
        "world_rank": 0,
        "data_parallel_rank": 0,
        "pipeline_rank": 0,
        "tensor_parallel_rank": 0,
        "layers": [[0]],
        "host": "node17",
    }
    (ranks / "rank-00000.jsonl").write_text(json.dumps(header) + "\n")
    other = header | {"data_parallel_rank": 1, "host": ""}
    (ranks / "rank-00001.jsonl").write_text(json.dumps(other) + "\n")
    (ranks / "rank-00002.jsonl").write_text('{"type": "ra')
    assert hosts_of(tmp_path) == {(0, 0): "node17"}


def test_quiet_time_does_not_follow_a_clock_that_is_set(tmp_path: Path, lines: list[bytes]) -> None:
    """Hours forward and back, between looks that are ten seconds apart."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(lines[0])
    os.utime(path, (1_000.0, 1_000.0))
    now_s = 0.0
    unix_s = iter([1_005.0])
    follower = StepLogFollower(tmp_path, clock=lambda: now_s, unix_clock=lambda: next(unix_s))
    assert follower.quiet_s is None
    follower.poll()
    assert follower.quiet_s == 5.0
    now_s = 10.0
    os.utime(path, (-8_000.0, -8_000.0))
    follower.poll()
    assert follower.quiet_s == 15.0
    with path.open("ab") as stream:
        stream.write(b"{")
    follower.poll()
    assert follower.quiet_s == 0.0
