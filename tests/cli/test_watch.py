# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch`` on a run that ended, one in progress, and one that has not begun."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli import watch
from sparsebalance_megatron.log.follow import StepLogFollower

RUN = SampleRun(ranks=2, stages=1, micro_batches=2, layers=2, steps=4)


def test_once_shows_how_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUN.write(tmp_path)
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    assert "iteration 4 | " in capsys.readouterr().out
    assert cli.main(["watch", str(tmp_path), "--once", "--plain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_run_is_followed_from_before_its_first_step(tmp_path: Path) -> None:
    """Every sleep is a chance for the run to write; they are seen as they come."""
    written = RUN.write(tmp_path / "finished") / "steps.jsonl"
    lines = written.read_bytes().splitlines(keepends=True)
    path = tmp_path / "steps.jsonl"
    pieces = iter([b"", *lines, b""])

    def write_more(_: float) -> None:
        with path.open("ab") as stream:
            stream.write(next(pieces))

    follower = StepLogFollower(tmp_path)
    views = watch._views(follower, 1.0, write_more)
    first, *others = islice(views, 1 + RUN.steps)
    assert first is None
    assert [view.step.iteration for view in others if view is not None] == [1, 2, 3, 4]


def test_ctrl_c_is_how_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RUN.write(tmp_path)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupted)
    assert cli.main(["watch", str(tmp_path), "--plain"]) == 0
    assert "iteration 4 | " in capsys.readouterr().out


def test_without_rich_the_plain_mode_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RUN.write(tmp_path)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "or use --plain" in capsys.readouterr().err
