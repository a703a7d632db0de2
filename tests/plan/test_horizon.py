# SPDX-License-Identifier: Apache-2.0
"""Coverage over a horizon: its steps' aims add up, and cost less than if each held its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import cost_model, coverage_curves, job_shape, policy, random_lengths

from sparsebalance_megatron.cost.calibrate import StageScales
from sparsebalance_megatron.plan.budgets import expected_budgets
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.feasible import feasible_range
from sparsebalance_megatron.plan.horizon import HORIZON_SAMPLES, coverage_aim, horizon_steps
from sparsebalance_megatron.plan.latency import step_costs
from sparsebalance_megatron.plan.planner import plan_step

JOB = job_shape(2, 2)
POLICY = policy(coverage_target="base")
KNOWN = {
    "job": JOB,
    "policy": POLICY,
    "cost": cost_model(),
    "scales": StageScales.ones(1),
}
LONG, SHORT = [16000, 15000, 14000, 12000], [700, 800, 900, 1000]


def aims(steps, coverage, owed):
    """Of every step, with all the others after it: one horizon, seen from each of its steps."""
    return [
        coverage_aim(
            lengths_tokens=step,
            later_lengths_tokens=[n for other in steps if other is not step for n in other],
            coverage=coverage,
            owed_coverage=owed,
            **KNOWN,
        )
        for step in steps
    ]


def work_and_surplus(lengths, coverage, aim):
    """Of the least work that reaches the aim: ms, and coverage above base budgets over samples."""
    costs = step_costs(lengths, JOB, KNOWN["cost"], KNOWN["scales"])
    allowed = feasible_range(costs, coverage, POLICY)
    budgets_LS = expected_budgets(POLICY, costs, coverage, allowed, aim)
    gained_LS = coverage.coverage_LS(costs.blocks_S, budgets_LS) - coverage.coverage_LS(
        costs.blocks_S, allowed.base_LS
    )
    return sum(part.sum() for part in costs.sample_ms(budgets_LS)), gained_LS.mean(axis=0).sum()


def spread_evenly(max_blocks=256):
    """Curves of scores that are all alike: query block j finds min(k, j) of its j blocks."""
    curves = CoverageCurves(JOB.layers, max_blocks, 0.9)
    grid = np.asarray(curves.grid)[:, None]
    rows = []
    for bucket in range(curves.buckets):
        blocks = np.arange(1, 2**bucket + 2**bucket // 2 + 1)
        rows.append((np.minimum(grid, blocks) / blocks).mean(axis=1))
    sums = np.broadcast_to(rows, curves.mean_LUK.shape)
    curves.update(sums, np.ones(curves.observed_LU.shape))
    return curves


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.floats(-1.0, 1.0),
)
def test_the_aims_of_a_horizon_add_up_to_what_it_owes(seed, sizes, owed_share):
    coverage = coverage_curves(JOB.layers, 400, seed=seed)
    lengths = random_lengths(sum(sizes), seed, longest=20000)
    ends = np.cumsum(sizes)
    steps = [lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    least, most = (work_and_surplus(lengths, coverage, aim)[1] for aim in (-np.inf, np.inf))
    owed = owed_share * most
    total = sum(a * len(s) for a, s in zip(aims(steps, coverage, owed), steps, strict=True))
    assert total == pytest.approx(max(owed, least), abs=1e-9 * len(lengths))


def test_a_step_gives_up_what_another_regains_for_less():
    coverage = spread_evenly()
    of_long, of_short = aims([LONG, SHORT], coverage, 0.0)
    assert of_long < -0.01 < 0.01 < of_short
    together = [
        work_and_surplus(LONG, coverage, of_long),
        work_and_surplus(SHORT, coverage, of_short),
    ]
    alone = [work_and_surplus(lengths, coverage, 0.0) for lengths in (LONG, SHORT)]
    assert sum(surplus for _, surplus in together) >= -1e-9
    assert sum(ms for ms, _ in together) < 0.97 * sum(ms for ms, _ in alone)


def test_a_plan_follows_the_aim_of_its_step():
    coverage = spread_evenly()
    given_ = {"step": 0, "coverage": coverage, **KNOWN}
    base = plan_step(**given_ | {"policy": replace(POLICY, tuning="off")}, lengths_tokens=LONG)
    alone = plan_step(**given_, lengths_tokens=LONG)
    followed = plan_step(**given_, lengths_tokens=LONG, later_lengths_tokens=SHORT)
    aim, _ = aims([LONG, SHORT], coverage, 0.0)
    assert alone.expectation.coverage_mean >= base.expectation.coverage_mean - 1e-9
    assert followed.expectation.coverage_mean >= base.expectation.coverage_mean + aim - 1e-9
    assert followed.expectation.coverage_mean < base.expectation.coverage_mean
    assert followed.expectation.makespan_ms < 0.97 * alone.expectation.makespan_ms


def test_where_all_coverage_has_one_price_an_aim_lies_between_two_levels():
    """As many samples of one length as one likes: nobody pays for another."""
    for owed in (-0.2, 0.0, 0.2):
        found = aims([[3000] * 4, [3000] * 4], spread_evenly(), owed)
        assert found == pytest.approx([owed / 8] * 2)


def test_without_later_steps_a_step_owes_all_of_it():
    known = KNOWN | {"coverage": spread_evenly(), "lengths_tokens": LONG}
    for owed in (-0.2, 0.0, 0.4):
        aim = coverage_aim(later_lengths_tokens=(), owed_coverage=owed, **known)
        assert aim == pytest.approx(owed / 4)


def test_what_was_never_observed_aims_at_nothing():
    unknown = CoverageCurves(JOB.layers, 256, 0.9)
    assert aims([LONG, SHORT], unknown, 0.0) == [0.0, 0.0]


def test_horizons_hold_whole_steps():
    assert [horizon_steps(n) for n in (1, 8, 100, 127)] == [HORIZON_SAMPLES, 16, 2, 2]
    assert [horizon_steps(n) for n in (128, 129, 4096)] == [1, 1, 1]
