# SPDX-License-Identifier: Apache-2.0
"""The step log's line of one step: what is written is what is read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from step_cases import JOB, LENGTHS_TOKENS, measured_as_planned, planned_step

from sparsebalance_megatron.telemetry.jsonl import BadLineError
from sparsebalance_megatron.telemetry.step_record import (
    FinishedStep,
    Step,
    read_step,
    read_times,
    step_record,
)


def written(**changes: Any) -> dict[str, Any]:
    """A step's record as it comes back from the file."""
    planned = planned_step()
    values: dict[str, Any] = {
        "iteration": 7,
        "iteration_ms": 10.5,
        "planned": planned,
        "measured": replace(measured_as_planned(planned), lm_loss=2.25),
        "padded_tokens": 3,
        "host_ms": {"plan": 1.0},
    }
    return json.loads(json.dumps(step_record(FinishedStep(**(values | changes))), allow_nan=False))


def test_every_field_comes_back() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    expectation = planned.plan.expectation
    times_2RPVM = expectation.times_2RPVM
    busy_R = times_2RPVM.sum(axis=(0, 3, 4)).max(axis=1)
    record = written()
    assert read_step(record) == Step(
        iteration=7,
        iteration_ms=10.5,
        lm_loss=2.25,
        tokens=sum(LENGTHS_TOKENS),
        coverage=pytest.approx(0.45),
        measured_rank_ms=tuple(pytest.approx(busy_ms) for busy_ms in busy_R),
        predicted_rank_ms=tuple(pytest.approx(busy_ms) for busy_ms in busy_R),
        lower_bound_ms=expectation.lower_bound_ms,
        work_ratio=expectation.work_ratio,
        complete=True,
        coverage_base=measured.coverage.base_mean,
        compute_ms=pytest.approx(times_2RPVM.sum(axis=(0, 3, 4)).mean()),
        schedule_ms=pytest.approx(measured.schedule_ms.max()),
    )
    times = read_times(record)
    assert times.shape == expectation.times_2RPVM[0].shape
    for side in ("predicted", "measured"):
        np.testing.assert_array_equal(times.side(side), times_2RPVM)


def test_what_was_not_measured_comes_back_as_none() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    unmeasured = np.full_like(measured.times_2RPVM[0], math.nan).tolist()
    record = written(iteration_ms=None)
    record["measured"] |= {"forward_ms": unmeasured, "rank_busy_ms": None}
    record["lm_loss"] = None
    step, times = read_step(record), read_times(record)
    assert (step.iteration_ms, step.lm_loss) == (None, None)
    assert (step.measured_rank_ms, step.complete) == (None, False)
    assert np.isnan(times.measured_2RPVM[0]).all()
    np.testing.assert_array_equal(times.measured_2RPVM[1], measured.times_2RPVM[1])


def test_a_log_of_totals_has_no_predicted_times() -> None:
    for change in ({"forward_ms": None}, {"backward_ms": [[[[1.0]]]]}):
        record = written()
        record["predicted"] |= change
        assert read_times(record).predicted_2RPVM is None


@pytest.mark.parametrize("missing", ["iteration", "iteration_ms", "lm_loss", "tokens", "measured"])
def test_a_missing_value_is_named(missing: str) -> None:
    record = written()
    del record[missing]
    with pytest.raises(BadLineError, match=missing):
        read_step(record)


def test_devices_that_are_not_alike_have_the_slowness_they_were_planned_with() -> None:
    unknown = planned_step()
    equal_DP = np.ones((JOB.data_parallel_size, JOB.pipeline_stages))
    uneven_DP = equal_DP.copy()
    uneven_DP[0, 1] = 1.25
    equal, uneven = (
        replace(unknown, scales=replace(unknown.scales, slowness_RP=x))
        for x in (equal_DP, uneven_DP)
    )
    for planned, expected in ((unknown, None), (equal, None), (uneven, uneven_DP.tolist())):
        step = FinishedStep(
            iteration=1,
            iteration_ms=None,
            planned=planned,
            measured=measured_as_planned(planned),
            padded_tokens=0,
            host_ms={},
        )
        record = step_record(step)
        assert record["predicted"]["device_slowness"] == expected


def shared_first_position() -> dict[str, Any]:
    """A step whose first row lay on both ranks."""
    planned = planned_step()
    by_place = {(slot.rank, slot.position): slot for slot in planned.plan.slots}
    whole = replace(by_place[0, 0], width=2)
    del by_place[0, 0], by_place[1, 0]
    plan = replace(planned.plan, slots=(whole, *by_place.values()))
    return written(planned=replace(planned, plan=plan))


def test_who_shared_a_row_comes_back() -> None:
    record = shared_first_position()
    assert record["widths"] == [[2, 1], [2, 1]]
    times = read_times(record)
    np.testing.assert_array_equal(times.widths_RM, [[2, 1], [2, 1]])
    assert (times.shared_rows, times.widest) == (1, 2)
    alone = written()
    assert alone["widths"] is None
    np.testing.assert_array_equal(read_times(alone).widths_RM, 1)
    assert (read_times(alone).shared_rows, read_times(alone).widest) == (0, 1)


@pytest.mark.parametrize(
    "widths",
    [
        [[2, 1], [1, 1]],
        [[1, 1], [2, 1]],
        [[3, 1], [3, 1]],
        [[4, 1], [4, 1]],
        [[0, 1], [1, 1]],
        [[None, 1], [1, 1]],
        [[1.5, 1], [1, 1]],
        [[1, 1]],
        "two",
    ],
)
def test_groups_that_cannot_be_are_named(widths: Any) -> None:
    with pytest.raises(BadLineError, match="widths"):
        read_times(written() | {"widths": widths})


@pytest.mark.parametrize(
    ("widths_of_ranks", "possible"),
    [([1, 2, 2, 1], False), ([2, 2, 1, 1, 1], True), ([1, 1, 2, 2], True), ([1, 1, 1, 2], False)],
)
def test_groups_begin_at_multiples_of_their_width(
    widths_of_ranks: list[int], possible: bool
) -> None:
    times = np.ones((len(widths_of_ranks), 1, 1, 1)).tolist()
    record = written() | {"widths": [[width] for width in widths_of_ranks]}
    record["measured"] |= {"forward_ms": times, "backward_ms": times}
    if possible:
        assert read_times(record).widest == 2
    else:
        with pytest.raises(BadLineError, match="widths"):
            read_times(record)
