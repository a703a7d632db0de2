# SPDX-License-Identifier: Apache-2.0
"""Loss of two runs and their difference, as lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.comparison import summarize
from sparsebalance_megatron.view.report.loss_lines import LINES_HEIGHT, LINES_WIDTH, loss_panels

RUN = SampleRun(ranks=1, stages=1, micro_batches=2, layers=2, steps=5, with_ranks=False)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[StepRecord, ...]:
    directory: Path = tmp_path_factory.mktemp("run")
    return read_run_log(replace(RUN).write(directory)).steps


def with_losses(steps: tuple[StepRecord, ...], *losses: float | None) -> list[StepRecord]:
    return [
        msgspec.structs.replace(step, lm_loss=loss)
        for step, loss in zip(steps, losses, strict=False)
    ]


def test_both_runs_and_their_difference(steps: tuple[StepRecord, ...]) -> None:
    baseline = with_losses(steps, 4.0, 3.0, 2.0)
    loss, difference = loss_panels(with_losses(steps, 4.5, 2.5, None, 2.0), baseline)
    assert list(loss.lines) == ["baseline", "this run"]
    first, *_, last = loss.lines["this run"].split()
    assert first == "0.0,0.0" and last == f"{LINES_WIDTH},{LINES_HEIGHT}"
    assert difference.lines == {"difference": f"0.0,0.0 {LINES_WIDTH},{LINES_HEIGHT}"}
    assert [text for _, text in difference.y_ticks] == ["-0.5", "0.5"]
    assert difference.zero_y == LINES_HEIGHT / 2
    assert [text for _, text in difference.x_ticks] == ["1", "2"]


def test_less_is_known(steps: tuple[StepRecord, ...]) -> None:
    assert loss_panels(with_losses(steps, 1.0), ()) == ()
    assert len(loss_panels(with_losses(steps, 1.0, 1.0), ())) == 1
    same = loss_panels(with_losses(steps, 1.0, 1.0), with_losses(steps, 1.0, 1.0))
    assert same[1].zero_y == LINES_HEIGHT / 2


def test_coverage_lost_is_weighed_by_tokens(steps: tuple[StepRecord, ...]) -> None:
    changed = [
        msgspec.structs.replace(
            step,
            tokens=tokens,
            coverage=msgspec.structs.replace(
                step.coverage, mean=0.7, base_mean=0.6, lost_by_token=lost
            ),
        )
        for step, tokens, lost in zip(steps[:3], (100, 300, 5), (0.01, 0.05, None), strict=True)
    ]
    found = summarize(changed)
    assert found.coverage_gain == pytest.approx(0.1)
    assert found.coverage_gain_by_token == pytest.approx(-(0.01 * 100 + 0.05 * 300) / 400)
    assert summarize(changed[2:]).coverage_gain_by_token is None
