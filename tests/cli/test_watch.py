# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch`` on a run that ended, one in progress, and one that has not begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_cases import step_record
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import watch
from sparsebalance_megatron.plan.job import lockstep_notice

RUN = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=4, noise=0.0)


def printed(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert cli.main(["watch", str(directory), *flags]) == 0
    return capsys.readouterr().out.splitlines()


def records(directory: Path, iterations: int | None = None) -> list[dict[str, Any]]:
    """The step log of a run of which stage 0 of rank 1 takes half as long again as predicted."""
    path = RUN.write(directory) / "steps.jsonl"
    header, *others = (json.loads(line) for line in path.read_text().splitlines())
    for record in others:
        if record["type"] == "step":
            own = np.array(record["predicted"]["times_2RPVM"])
            own[:, 1, 0] *= 1.5
            record["measured"]["times_2RPVM"] = own.tolist()
    return [header | {"iterations": iterations}, *others]


def test_a_finished_run_is_a_table_of_80_columns_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "steps.jsonl", [*records(tmp_path, iterations=4), "{broken"])
    *legend, _, row, slowest, end = lines = printed(tmp_path, capsys)
    assert legend and max(map(len, lines)) <= 80
    assert row.split()[:3] == ["4", "of", "4"] and row.split()[-3].endswith("%")
    assert slowest.startswith("slowest: rank 1 stage 0 on node0, 1.50 times")
    assert end == "4 of 4, ended"


def test_the_widest_row_fits() -> None:
    figures = {"coverage": 0.123, "coverage_base": 0.123, "imbalance": 12.34}
    step = step_record(123456, iteration_ms=1234567.0, lm_loss=12.345678, figures=figures)
    assert len(watch.step_row(step, 1234567.0, 999999)) <= 80


def test_ranks_in_lockstep_are_told_once_and_the_slowest_is_found_by_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has a slow stage, for which rank 0 waits."""
    header, *others = records(tmp_path, iterations=4)
    for record in others:
        if record["type"] == "step":
            own = np.array(record["measured"]["times_2RPVM"])
            passed = np.broadcast_to(own.max(axis=1, keepdims=True), own.shape)
            record["measured"] |= {
                "times_2RPVM": passed.tolist(),
                "waiting_2RPVM": (passed - own).tolist(),
            }
    header["job"]["lockstep_ranks"] = 2
    path = tmp_path / "steps.jsonl"
    write_lines(path, [header, *others[:-1]])
    monkeypatch.setattr(watch.time, "sleep", lambda _: write_lines(path, [header, *others]))
    lines = printed(tmp_path, capsys)
    notice = lockstep_notice(2)
    assert notice is not None and " ".join(lines).count(notice) == 1
    assert [line.split()[0] for line in lines if " of 4 " in line] == ["3", "4"]
    assert sum(line.startswith("slowest: rank 1 stage 0 on node0, 1.50") for line in lines) == 1
    assert lines[-1] == "4 of 4, ended"


def test_a_run_is_followed_from_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sleep is a chance for the run to write."""
    written = RUN.write(tmp_path / "finished") / "steps.jsonl"
    pieces = iter([b"", *written.read_bytes().splitlines(keepends=True), b""])

    def write_more(_: float) -> None:
        if (piece := next(pieces, None)) is None:
            raise KeyboardInterrupt
        with (tmp_path / "steps.jsonl").open("ab") as stream:
            stream.write(piece)

    monkeypatch.setattr(watch.time, "sleep", write_more)
    first, *others = printed(tmp_path, capsys)
    assert "no step" in first
    rows = [line.split()[0] for line in others if line.split()[0].isdigit()]
    assert rows == ["1", "2", "3", "4"]


def test_a_host_cannot_send_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "steps.jsonl", records(tmp_path))
    for path in (tmp_path / "ranks").iterdir():
        path.write_text(path.read_text().replace('"node0"', r'"\u001b[31mred\n"'))
    lines = printed(tmp_path, capsys, "--once")
    assert any(" on \\x1b[31mred\\n" in line for line in lines)
    assert all(line.isprintable() for line in lines)
