# SPDX-License-Identifier: Apache-2.0
"""The picture of a typical step."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebalance_megatron.report.picture import PictureError, draw_step, typical_step
from sparsebalance_megatron.telemetry.step_log import RunLog
from sparsebalance_megatron.telemetry.step_record import Step


def step(iteration: int, *rank_ms: float) -> Step:
    return Step(
        iteration=iteration,
        iteration_ms=None,
        lm_loss=None,
        tokens=1,
        coverage=None,
        measured_rank_ms=rank_ms,
        predicted_rank_ms=None,
        lower_bound_ms=None,
        work_ratio=None,
        micro_batch_ms=tuple(((ms / 4, 3 * ms / 4),) for ms in rank_ms) or None,
    )


def log(*steps: Step) -> RunLog:
    return RunLog(directory=Path("run"), header={}, steps=steps, problems=())


def test_the_step_of_median_imbalance_is_drawn() -> None:
    baseline = log(*(step(i, 100.0, 100.0 - i) for i in range(1, 10)))
    balanced = log(*(step(i, 90.0, 90.0) for i in range(1, 10)))
    first, second = typical_step(baseline, balanced)
    # The first two of nine steps are warm-up; the median of the other seven is the sixth.
    assert first.iteration == second.iteration == 6


def test_steps_without_times_or_partner_are_passed_over() -> None:
    baseline = log(step(1), step(2, 10.0, 5.0), step(3, 10.0, 5.0))
    balanced = log(step(1, 9.0, 9.0), step(3, 9.0, 9.0))
    assert typical_step(baseline, balanced)[0].iteration == 3
    with pytest.raises(PictureError, match="share no step"):
        typical_step(baseline, log(step(2)))


def test_the_picture_names_ranks_and_iteration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "step.svg"
    runs = log(step(7, 100.0, 50.0)), log(step(7, 80.0, 75.0))
    assert draw_step(*runs, path) == 7
    text = path.read_text()
    assert text.lstrip().startswith("<?xml")
    assert "iteration 7" in text and "rank 1" in text
