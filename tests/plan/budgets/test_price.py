# SPDX-License-Identifier: Apache-2.0
"""One price over a horizon: the steps' wants add up, and cost less than if each held its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import (
    cost_model,
    coverage_curves,
    job_shape,
    plan_settings,
    planned,
    random_lengths,
)

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.budgets.policy import budget_problem
from sparsebalance_megatron.plan.budgets.price import HORIZON_SAMPLES, horizon_steps, price
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import step_costs

JOB = job_shape(2, 2)
POLICY = plan_settings(tuning="makespan", coverage_target="base")
COST, SCALES = cost_model(), StageScales.ones(1)
LONG, SHORT = [16000, 15000, 14000, 12000], [700, 800, 900, 1000]


class Step:
    """A step, and the others of its horizon: which of them comes first makes no difference."""

    def __init__(self, own, others, coverage, owed=0.0, tuning_policy=POLICY):
        self.costs = step_costs([*others, *own], JOB, COST, SCALES)
        problem = budget_problem(tuning_policy, self.costs, coverage)
        self.allowed = problem.allowed
        self.own = slice(len(others), None)
        self.coverage = coverage
        self.pricing = price(problem, self.own, owed)

    def covered(self, budgets_LS):
        """Summed over the own samples and their layers."""
        return self.coverage.coverage_LS(self.costs.blocks_S[self.own], budgets_LS).sum()

    @property
    def surplus(self):
        """Coverage wanted above that of base budgets, summed over samples."""
        base = self.covered(self.allowed.base_LS[:, self.own])
        return (self.pricing.wanted_coverage - base) / self.coverage.layers

    @property
    def work_ms(self):
        return self.costs.of(self.own).sample_ms(self.pricing.expected_LS).sum()


def horizon(steps, coverage, owed=0.0):
    return [
        Step(step, [n for other in steps if other is not step for n in other], coverage, owed)
        for step in steps
    ]


def spread_evenly(max_blocks=256):
    """Curves of scores that are all alike: query block j finds min(k, j) of its j blocks."""
    curves = CoverageCurves(JOB.layers, max_blocks, 0.9)
    grid = np.asarray(curves.grid)[:, None]
    rows = []
    for bucket in range(curves.buckets):
        blocks = np.arange(1, 2**bucket + 2**bucket // 2 + 1)
        rows.append((np.minimum(grid, blocks) / blocks).mean(axis=1))
    curves.observe(np.broadcast_to(rows, curves.mean_LUK.shape), np.ones(curves.observed_LU.shape))
    return curves


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.floats(-1.0, 1.0),
)
def test_what_the_steps_of_a_horizon_want_adds_up_to_what_it_owes(seed, sizes, owed_share):
    coverage = coverage_curves(JOB.layers, 400, seed=seed)
    lengths = random_lengths(sum(sizes), seed, longest=20000)
    ends = np.cumsum(sizes)
    steps = [lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    whole = Step(lengths, [], coverage)
    base = whole.covered(whole.allowed.base_LS)
    least, most = (
        (whole.covered(budgets_LS) - base) / coverage.layers
        for budgets_LS in (whole.allowed.floor_LS, whole.allowed.top_LS)
    )
    owed = owed_share * most
    found = horizon(steps, coverage, owed)
    tolerance = 1e-8 * len(lengths)
    assert sum(step.surplus for step in found) == pytest.approx(max(owed, least), abs=tolerance)
    for step in found:
        expected = step.covered(step.pricing.expected_LS)
        assert expected >= step.pricing.wanted_coverage - tolerance


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.floats(-0.05, 0.05),
    st.sampled_from([0.0, 0.01]),
)
def test_every_length_holds_its_own_mean_over_a_horizon(seed, sizes, owed, slack):
    """What the steps want of a length adds up to what it owes, as far as there is coverage."""
    chosen = replace(POLICY, coverage_mean_over="length-buckets", coverage_slack=slack)
    coverage = coverage_curves(JOB.layers, 400, seed=seed)
    lengths = random_lengths(sum(sizes), seed, longest=20000)
    ends = np.cumsum(sizes)
    steps = [lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    found, deficit_B = [], owed * np.arange(6)
    for step in steps:
        others = [n for other in steps if other is not step for n in other]
        costs = step_costs([*others, *step], JOB, COST, SCALES)
        problem = budget_problem(chosen, costs, coverage, coverage_deficit=deficit_B)
        own = slice(len(others), None)
        found.append((problem, own, price(problem, own, deficit_B)))
    whole = budget_problem(chosen, step_costs(lengths, JOB, COST, SCALES), coverage)
    base_B, least_B, most_B = (
        covered_by_mean(whole, budgets_LS)
        for budgets_LS in (whole.allowed.base_LS, whole.allowed.floor_LS, whole.allowed.top_LS)
    )
    samples_B = np.bincount(whole.mean_S, minlength=len(base_B))
    goal_B = base_B + JOB.layers * (deficit_B * (samples_B > 0) - slack * samples_B)
    wanted_B = sum(pricing.wanted_B / problem.worth_B for problem, _, pricing in found)
    expected_B, limit_B = (
        sum(
            covered_by_mean(problem.of(own), getattr(pricing, name))
            for problem, own, pricing in found
        )
        for name in ("expected_LS", "limit_LS")
    )
    tolerance = 1e-8 * len(lengths)
    assert wanted_B == pytest.approx(np.clip(goal_B, least_B, most_B), abs=tolerance)
    assert (expected_B >= wanted_B - tolerance).all()
    assert (limit_B >= base_B - tolerance).all()


def covered_by_mean(problem, budgets_LS):
    """Coverage of every mean, summed over its samples and their layers."""
    covered_S = problem.coverage_LS(budgets_LS).sum(axis=0)
    return np.bincount(problem.mean_S, covered_S, len(problem.worth_B))


def test_a_deficit_of_one_length_raises_its_price_alone():
    chosen = replace(POLICY, coverage_mean_over="length-buckets")
    costs = step_costs([3000] * 8 + [12000] * 8, JOB, COST, SCALES)
    curves = coverage_curves(JOB.layers, 400, seed=3)
    level, owing = (
        budget_problem(chosen, costs, curves, coverage_deficit=np.array(deficit_B))
        for deficit_B in ([0.0] * 6, [0.0, 0.0, 0.0, 0.0, 0.5, 0.0])
    )
    short, long = level.mean_S[0], level.mean_S[-1]
    assert (short, long) == (2, 4)
    assert owing.worth_B[long] > 1.2 * level.worth_B[long]
    assert owing.worth_B[short] == level.worth_B[short]


def test_a_step_gives_up_what_another_regains_for_less():
    coverage = spread_evenly()
    of_long, of_short = horizon([LONG, SHORT], coverage)
    assert of_long.surplus / 4 < -0.01 < 0.01 < of_short.surplus / 4
    alone = [Step(lengths, [], coverage) for lengths in (LONG, SHORT)]
    assert [step.surplus for step in alone] == pytest.approx([0.0, 0.0], abs=1e-8)
    assert of_long.work_ms + of_short.work_ms < 0.97 * sum(step.work_ms for step in alone)


def test_where_all_coverage_has_one_price_wants_lie_between_two_levels():
    """Samples of one length, all layers alike: nobody pays for another."""
    for owed in (-0.2, 0.0, 0.2):
        found = horizon([[3000] * 4, [3000] * 4], spread_evenly(), owed)
        assert [step.surplus for step in found] == pytest.approx([owed / 2] * 2)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_the_limits_of_a_horizon_cover_what_base_budgets_cover(seed, sizes):
    """Whatever is owed."""
    coverage = coverage_curves(JOB.layers, 400, seed=seed)
    lengths = random_lengths(sum(sizes), seed, longest=20000)
    ends = np.cumsum(sizes)
    steps = [lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    found = horizon(steps, coverage, owed=100.0)
    covered = sum(step.covered(step.pricing.limit_LS) for step in found)
    at_base = sum(step.covered(step.allowed.base_LS[:, step.own]) for step in found)
    assert covered >= at_base - 1e-8


def test_the_limits_of_a_horizon_take_the_work_of_base_budgets():
    """Together; the step of long samples may take less than at base budgets, that of short more."""
    found = horizon([LONG, SHORT], spread_evenly(), owed=100.0)
    limits, base = (
        np.array([step.costs.of(step.own).sample_ms(budgets).sum() for step, budgets in of])
        for of in (
            [(step, step.pricing.limit_LS) for step in found],
            [(step, step.allowed.base_LS[:, step.own]) for step in found],
        )
    )
    assert limits.sum() <= 1.01 * base.sum()
    assert limits[0] < base[0]
    assert limits[1] > base[1]


def test_a_step_alone_may_take_the_time_of_base_budgets():
    step = Step(LONG, [], spread_evenly(), 0.5)
    assert (step.pricing.limit_LS == step.allowed.base_LS).all()


def test_a_plan_follows_what_its_step_wants():
    coverage = spread_evenly()
    given_ = {
        "step": 0,
        "lengths_tokens": LONG,
        "job": JOB,
        "plan_settings": POLICY,
        "cost": COST,
        "scales": SCALES,
        "coverage": coverage,
    }
    base = planned(**given_ | {"plan_settings": replace(POLICY, tuning="off")}).expectation
    alone = planned(**given_).expectation
    followed = planned(**given_, later_lengths_tokens=tuple(SHORT)).expectation
    wanted = horizon([LONG, SHORT], coverage)[0].surplus / len(LONG)
    assert alone.coverage_mean >= base.coverage_mean - 1e-9
    assert base.coverage_mean + wanted - 1e-9 <= followed.coverage_mean < base.coverage_mean
    assert followed.makespan_ms < 0.97 * alone.makespan_ms


def test_a_threshold_wants_nothing_and_expects_floors():
    """Whatever comes later."""
    for others in ([], SHORT):
        step = Step(LONG, others, spread_evenly(), tuning_policy=plan_settings(tuning="makespan"))
        assert step.pricing.wanted_coverage == -np.inf
        assert (step.pricing.expected_LS == step.allowed.floor_LS[:, step.own]).all()


def test_what_was_never_observed_wants_nothing():
    step = Step(LONG, SHORT, CoverageCurves(JOB.layers, 256, 0.9))
    assert step.pricing.wanted_coverage == 0.0
    assert (step.pricing.expected_LS == step.allowed.base_LS[:, step.own]).all()


def test_nothing_is_owed_unless_said():
    problem = budget_problem(
        POLICY, step_costs(LONG, JOB, COST, SCALES), coverage_curves(2, seed=2)
    )
    assert price(problem).wanted_coverage == price(problem, coverage_deficit=0.0).wanted_coverage


def test_horizons_hold_whole_steps():
    assert [horizon_steps(n) for n in (1, 8, 50, 63)] == [HORIZON_SAMPLES, 8, 2, 2]
    assert [horizon_steps(n) for n in (64, 65, 4096)] == [1, 1, 1]


def test_slack_lowers_what_is_wanted():
    curves = coverage_curves(JOB.layers, seed=2)
    slack = 0.01
    strict, loose = (
        Step(LONG, SHORT, curves, tuning_policy=replace(POLICY, coverage_slack=points))
        for points in (0.0, slack)
    )
    both = [
        Step(SHORT, LONG, curves, tuning_policy=s)
        for s in (POLICY, replace(POLICY, coverage_slack=slack))
    ]
    wanted = [
        a.pricing.wanted_coverage + b.pricing.wanted_coverage
        for a, b in zip((strict, loose), both, strict=True)
    ]
    assert wanted[0] - wanted[1] == pytest.approx(slack * 8 * JOB.layers)
