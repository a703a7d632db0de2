# SPDX-License-Identifier: Apache-2.0
"""Series over steps: pairs, bins, and what is said where there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.report.charts.series import (
    balance_picture,
    binned,
    loss_picture,
    paired,
)
from sparsebalance_megatron.telemetry.step_log import RunLog
from sparsebalance_megatron.telemetry.step_record import Step

pytest.importorskip("matplotlib")


def step(iteration: int, **changes: Any) -> Step:
    values: dict[str, Any] = {
        "iteration": iteration,
        "iteration_ms": 100.0,
        "lm_loss": 5.0,
        "tokens": 64,
        "coverage": 0.75,
        "measured_rank_ms": (90.0, 70.0),
        "predicted_rank_ms": (81.0, 77.0),
        "lower_bound_ms": 60.0,
        "work_ratio": 1.0,
        "complete": False,
    }
    return Step(**(values | changes))


def log(*steps: Step) -> RunLog:
    return RunLog(directory=Path("run"), header={}, steps=steps, problems=())


def test_pairs_saw_as_many_tokens() -> None:
    run = log(step(1), step(2), step(3, tokens=65))
    pairs = paired(run, log(step(2), step(3), step(4)))
    assert [(old.iteration, new.iteration) for old, new in pairs] == [(2, 2)]


@given(
    values=st.lists(st.one_of(st.just(np.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=40),
    limit=st.integers(1, 12),
)
def test_bins_keep_every_value_within_their_shade(values: list[float], limit: int) -> None:
    iterations = np.arange(1.0, len(values) + 1)
    places, middle, (low, high) = binned((iterations, np.array(values)), limit)
    assert len(places) <= limit
    assert np.isfinite(middle).any() == np.isfinite(values).any()
    known = np.isfinite(middle)
    assert (low[known] <= middle[known]).all() and (middle[known] <= high[known]).all()
    if len(values) <= limit:
        np.testing.assert_array_equal(places, iterations)
        np.testing.assert_array_equal(middle, values)


def test_the_speedup_is_said_in_words() -> None:
    run = log(*(step(i, iteration_ms=50.0) for i in (1, 2, 3)), step(4, tokens=1))
    picture = balance_picture(run, log(*(step(i) for i in (1, 2, 3, 4))))
    assert picture.svg is not None
    assert "speedup, step by step, median 2." in picture.alt
    assert "median 1.125" in picture.alt
    assert "1 steps have no partner with as many tokens" in picture.caption
    for label in ("baseline", "predicted", "measured"):
        assert f">{label}<" in picture.svg


def test_without_a_baseline_iteration_times_are_drawn() -> None:
    picture = balance_picture(log(step(1), step(2, iteration_ms=None)), None)
    assert picture.svg is not None and ">iteration, ms<" in picture.svg
    assert ">baseline<" not in picture.svg


def test_many_steps_are_binned_and_that_is_said() -> None:
    picture = loss_picture(log(*(step(i, lm_loss=1.0 + i % 2) for i in range(1, 1001))), None)
    assert "A point is the median of 4 steps" in picture.caption
    assert picture.svg is not None and len(picture.svg) < 60_000


def test_losses_of_both_runs() -> None:
    run = log(*(step(i, lm_loss=2.0) for i in range(1, 31)))
    picture = loss_picture(run, log(*(step(i, lm_loss=2.5) for i in range(1, 31))))
    assert "Over the last 3 common steps the run's mean loss is 0.5000 below" in picture.caption


def test_nothing_measured() -> None:
    nothing = step(1, measured_rank_ms=None, iteration_ms=None, lm_loss=None)
    assert balance_picture(log(nothing), None).svg is None
    assert loss_picture(log(nothing), None).svg is None
    assert loss_picture(log(), log()).caption == "No step has a loss."
