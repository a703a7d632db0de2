# SPDX-License-Identifier: Apache-2.0
"""Coverage curves and the scatter of predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparsebalance_megatron.report.charts.coverage import coverage_picture, scatter_picture
from sparsebalance_megatron.telemetry.coverage_record import CoverageRecord
from sparsebalance_megatron.telemetry.step_record import MicroBatchTimes, Step

pytest.importorskip("matplotlib")


def record(curves_LUK: Any) -> CoverageRecord:
    return CoverageRecord(
        iteration=12,
        grid=(1, 2, 3, 4),
        bucket_blocks=(1, 3, 4),
        curves_LUK=np.array(curves_LUK, dtype=np.float64),
    )


NONE = [np.nan] * 4


def test_a_frame_per_observed_length() -> None:
    known = [0.5, 0.75, 0.9, 1.0]
    picture = coverage_picture(
        record([[[1.0] * 4, known, NONE], [NONE, known, known]]),
        {"base_budget": 2, "coverage_threshold": 0.1},
    )
    assert picture.svg is not None
    assert ">2-3 blocks<" in picture.svg and ">4 blocks<" in picture.svg
    assert ">1 blocks<" not in picture.svg, "of one block every budget covers all"
    assert "after iteration 12" in picture.caption
    assert "lies 0.1 below" in picture.caption
    assert picture.alt == "Coverage against budget in 2 length buckets of 2 layers."


def test_no_curves() -> None:
    assert "no record" in coverage_picture(None, {}).caption
    assert coverage_picture(record([[NONE, NONE, NONE]]), {}).svg is None
    assert coverage_picture(record([[[1.0] * 4, NONE, NONE]]), {}).svg is None


def times(predicted: float | None, measured: float) -> MicroBatchTimes:
    full = np.full((1, 1, 1, 4), 1.0)
    return MicroBatchTimes(
        measured_2RPVM=np.stack([measured * full, 2 * measured * full]),
        predicted_2RPVM=None if predicted is None else np.stack([predicted * full] * 2),
    )


def step(**changes: Any) -> Step:
    values: dict[str, Any] = dict.fromkeys(
        [field for field in Step.__dataclass_fields__ if field not in ("iteration", "tokens")]
    )
    return Step(**(values | {"iteration": 1, "tokens": 1} | changes))


def test_errors_are_of_micro_batches() -> None:
    picture = scatter_picture({1: times(9.0, 10.0)}, (), "all 1 steps")
    assert "forward: median error 10.0%, backward: median error 55.0%" in picture.alt


def test_unmeasured_micro_batches_are_no_points() -> None:
    picture = scatter_picture({1: times(9.0, np.nan), 2: times(9.0, 10.0)}, (), "2 steps")
    assert "forward: median error 10.0%" in picture.alt


def test_ranks_stand_in_where_micro_batches_were_not_predicted() -> None:
    steps = (
        step(predicted_rank_ms=(8.0, 12.0), measured_rank_ms=(10.0, 10.0)),
        step(predicted_rank_ms=(1.0, 1.0)),
    )
    picture = scatter_picture({1: times(None, 10.0)}, steps, "")
    assert "ranks: median error 20.0%" in picture.alt
    assert "were not logged" in picture.caption
    assert scatter_picture({}, (step(),), "").svg is None


def test_many_points_are_thinned() -> None:
    big = np.random.default_rng(0).uniform(1, 2, (2, 50, 2, 1, 200))
    many = MicroBatchTimes(measured_2RPVM=big, predicted_2RPVM=big)
    picture = scatter_picture({1: many}, (), "")
    assert picture.svg is not None and picture.svg.count("<use") < 6000
