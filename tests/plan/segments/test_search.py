# SPDX-License-Identifier: Apache-2.0
"""The search over orders, cuts and places of segments."""

from __future__ import annotations

import numpy as np
import pytest
from plan.segments.test_segments import inputs

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.segments.search import SegmentSearch
from sparsebalance_megatron.plan.segments.segmented_times import segmented_times
from sparsebalance_megatron.plan.step_problem import PlanInputs, StepProblem

LENGTHS = (60000, 50000, 40000, 30000, 900, 800, 700, 600)
LOPSIDED = (((0,), (1,), (2,), (3,)), ((4,), (5,), (6,), (7,)))
MOST_TOKENS = 200_000


def searched(most_tokens: int = MOST_TOKENS, **changes):
    problem = StepProblem.of(PlanInputs(**inputs(LENGTHS, tuning="off", **changes)))
    base_LS = problem.budgets.allowed.base_LS
    where, ms = SegmentSearch(problem, base_LS).best(Arrangement.of_groups(LOPSIDED), most_tokens)
    return problem, where, ms


def test_what_is_found_takes_what_the_search_says_and_holds_every_sample_once():
    problem, where, ms = searched()
    _, ms_R, _ = segmented_times(problem.costs, where, problem.budgets.allowed.base_LS)
    assert ms == pytest.approx(ms_R.max(), rel=1e-12)
    held = sorted(sample for rank in where.samples for samples in rank for sample in samples)
    assert held == list(range(8)) and where.is_cut


def test_long_samples_of_one_rank_are_traded_away():
    _, where, ms = searched()
    long = [sum(sample < 4 for (sample,) in rank) for rank in where.samples]
    assert long == [2, 2]
    _, start, start_ms = searched(plan_ms=1e-9)
    assert [sorted(rank) for rank in start.samples] == [sorted(rank) for rank in LOPSIDED]
    assert ms < 0.7 * start_ms


def test_a_search_without_effort_takes_the_best_start():
    _, where, ms = searched(plan_ms=1e-9)
    assert where.is_cut and np.isfinite(ms)


def test_no_order_is_found_where_all_hold_too_many_tokens():
    *_, ms = searched(most_tokens=1)
    assert ms == np.inf
