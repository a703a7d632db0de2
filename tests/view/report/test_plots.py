# SPDX-License-Identifier: Apache-2.0
"""Plots: coverage of the layers, losses of two runs and their difference."""

from __future__ import annotations

import numpy as np
from record_cases import step_record

from sparsebalance_megatron.log.records import CoverageRecord, StepRecord
from sparsebalance_megatron.view.report.plots import coverage_plots, loss_plots


def test_coverage_of_the_layers() -> None:
    curves_LUK = np.full((2, 3, 3), np.nan)
    curves_LUK[:, 2] = (0.2, 0.4, 0.8), (0.4, 0.6, 1.0)
    record = CoverageRecord(
        iteration=5, grid=(1, 2, 4), bucket_blocks=(1, 3, 4), curves_LUK=curves_LUK
    )
    (plot,) = coverage_plots(record, {"base_budget": 2})
    assert plot.title == "4 blocks"
    assert plot.dotted_x == plot.width / 2
    assert [*plot.lines.values()] == ["0.0,70.0 90.0,50.0 180.0,10.0"]
    assert plot.band.startswith("0.0,60.0") and plot.band.endswith("0.0,80.0")
    assert coverage_plots(None, {}) == ()
    (bare,) = coverage_plots(record, {})
    assert bare.dotted_x is None


def steps(*losses: float | None) -> list[StepRecord]:
    return [step_record(number, lm_loss=loss) for number, loss in enumerate(losses, start=1)]


def test_both_losses_and_their_difference() -> None:
    loss, difference = loss_plots(steps(4.5, 2.5, None, 2.0), steps(4.0, 3.0, 2.0))
    assert list(loss.lines) == ["baseline", "this run"]
    first, *_, last = loss.lines["this run"].split()
    assert first == "0.0,0.0" and last == f"{loss.width},{loss.height}"
    assert difference.lines == {"difference": f"0.0,0.0 {loss.width},{loss.height}"}
    assert [text for _, text in difference.y_ticks] == ["-0.5", "0.5"]
    assert difference.dashed_y == loss.height / 2
    assert [text for _, text in difference.x_ticks] == ["1", "2"]


def test_small_differences_have_no_exponent() -> None:
    *_, difference = loss_plots(steps(2.0, 2.00005), steps(2.0, 2.0))
    assert [text for _, text in difference.y_ticks] == ["0", "0.00005"]
