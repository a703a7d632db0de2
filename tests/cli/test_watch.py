# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch`` on a run that ended, one in progress, and one that has not begun."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import watch
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.plan.job import lockstep_notice

RUN = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=4, noise=0.0)


def last_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["watch", str(directory), "--once"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return line


def test_the_device_that_takes_longer_is_named_with_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RUN.write(tmp_path) / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["type"] == "step":
            for name in ("forward_ms", "backward_ms"):
                predicted = np.array(record["predicted"][name])
                predicted[1, 0] *= 1.5
                record["measured"][name] = predicted.tolist()
    write_lines(path, [*records, "{broken"])
    line = last_line(tmp_path, capsys)
    assert line.startswith("iteration 4 | ")
    assert "slowest rank 1 stage 0 on node0 1.50x" in line
    assert "1 damaged" in line


def test_ranks_in_lockstep_are_told_once_and_the_slowest_is_found_by_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has a slow stage, for which rank 0 waits."""
    path = RUN.write(tmp_path) / "steps.jsonl"
    header, *records = (json.loads(line) for line in path.read_text().splitlines())
    for record in records:
        if record["type"] == "step":
            for name in ("forward_ms", "backward_ms"):
                own = np.array(record["predicted"][name])
                own[1, 0] *= 1.5
                record["measured"][f"own_{name}"] = own.tolist()
                record["measured"][name] = np.broadcast_to(own.max(axis=0), own.shape).tolist()
    write_lines(path, [header | {"lockstep_ranks": 2}, *records[:-1]])
    monkeypatch.setattr(
        watch.time, "sleep", lambda _: write_lines(path, [header | {"lockstep_ranks": 2}, *records])
    )
    first, then = islice(watch.lines(tmp_path, 1.0), 2)
    notice, status = first.splitlines()
    assert notice == lockstep_notice(2)
    assert status.startswith("iteration 3 | ") and then.startswith("iteration 4 | ")
    for line in (status, then):
        assert "slowest rank 1 stage 0 on node0 1.50x" in line


@pytest.mark.parametrize(("age_s", "silent"), [(30.0, False), (600.0, True), (-9000.0, False)])
def test_a_run_that_works_is_not_called_silent_and_one_that_stopped_is(
    age_s: float,
    silent: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = RUN.write(tmp_path) / "steps.jsonl"
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(watch.time, "time", lambda: 1e9 + age_s)
    assert ("silent for 10 min" in last_line(tmp_path, capsys)) == silent


def test_a_run_is_followed_from_before_its_first_step_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sleep is a chance for the run to write; the wall clock is set in between."""
    written = RUN.write(tmp_path / "finished") / "steps.jsonl"
    pieces = iter([b"", *written.read_bytes().splitlines(keepends=True)])
    now_s = iter(range(0, 10**6, 40))

    def write_more(_: float) -> None:
        with (tmp_path / "steps.jsonl").open("ab") as stream:
            stream.write(next(pieces, b""))

    monkeypatch.setattr(watch.time, "sleep", write_more)
    monkeypatch.setattr(watch.time, "monotonic", lambda: float(next(now_s)))
    monkeypatch.setattr(watch.time, "time", lambda: float(-next(now_s)))
    first, *others = islice(watch.lines(tmp_path, 1.0), 2 + RUN.steps)
    assert "no step" in first
    assert [line.split()[1] for line in others] == ["1", "2", "3", "4", "4"]
    assert ["silent" in line for line in others] == [False] * 4 + [True]


def test_a_host_cannot_send_escape_sequences(tmp_path: Path) -> None:
    hosts = dict.fromkeys(np.ndindex(2, 2), "\x1b[31mred\n")
    line = watch.status_line(read_run_log(RUN.write(tmp_path)), hosts, None)
    assert " on \\x1b[31mred\\n" in line and line.isprintable()
