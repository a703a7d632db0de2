# SPDX-License-Identifier: Apache-2.0
"""Plots of coverage: of the layers, and the least that budgets may leave."""

from __future__ import annotations

import pytest

from sparsebalance_megatron.log.records import CoverageRecord
from sparsebalance_megatron.view.report.plots import coverage_plots


def test_coverage_of_the_layers_and_the_least() -> None:
    curves = ((None, None, (0.2, 0.4, 0.8)), (None, None, (0.4, 0.6, 1.0)))
    record = CoverageRecord(iteration=5, grid=(1, 2, 4), bucket_blocks=(1, 3, 4), curves=curves)
    (plot,) = coverage_plots(record, {"base_budget": 2, "coverage_threshold": 0.1})
    assert plot.title == "4 blocks"
    assert plot.dotted_x == plot.width / 2
    assert plot.dashed_y == pytest.approx(plot.height * (1 - 0.5 + 0.1))
    assert plot.mean == "0.0,70.0 90.0,50.0 180.0,10.0"
    assert plot.band.startswith("0.0,60.0") and plot.band.endswith("0.0,80.0")
    assert coverage_plots(None, {}) == ()
    (bare,) = coverage_plots(record, {})
    assert bare.dotted_x is None and bare.dashed_y is None
