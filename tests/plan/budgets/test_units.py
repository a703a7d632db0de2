# SPDX-License-Identifier: Apache-2.0
"""Units: what their levels take, and mean."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import job_shape, placed, problem_of, random_lengths, step_inputs

from sparsebalance_megatron.plan.budgets.price import LEVELS
from sparsebalance_megatron.plan.budgets.units import units_of
from sparsebalance_megatron.plan.search_effort import SearchEffort

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 3, 1, 1), (4, 2, 2, 1), (2, 2, 2, 2)])
"""Ranks, positions, stages and chunks."""


class Case:
    """Random samples in every micro-batch of lockstep groups, or of ranks alone, and the units of
    their rows."""

    def __init__(self, seed, shape, lockstep_ranks=2, observed=1.0):
        generator = np.random.default_rng(seed)
        self.job = replace(job_shape(*shape), lockstep_ranks=lockstep_ranks)
        samples = 2 * self.job.places
        lengths = random_lengths(samples, seed, longest=20000)
        slowness_RP = generator.uniform(0.8, 1.3, (shape[0], shape[2]))
        choices = {"observed": observed, "base_budget": 16, "max_blocks": 400}
        inputs = step_inputs(self.job, lengths, seed, slowness_RP=slowness_RP, **choices)
        self.problem = problem_of(inputs)
        self.costs = self.problem.costs
        micro_batch_of_S = np.r_[
            np.arange(self.job.places), generator.integers(0, self.job.places, self.job.places)
        ]
        self.where = placed(micro_batch_of_S, self.job)
        self.pipelines, self.budgets_LS = units_of(self.problem, self.where, SearchEffort(0.0))
        self.rows = self.job.places // lockstep_ranks
        self.level_XC = generator.integers(0, LEVELS + 1, (self.rows, self.costs.chunks))

    @property
    def ms_2XCQ(self):
        """Forward and backward of every row at every level."""
        return self.pipelines.ms(*np.ogrid[: self.rows, : self.costs.chunks, : LEVELS + 1])

    def row_ms_XC(self, budgets_LS):
        """Forward and backward of every row, by group and position."""
        times_2EPVM = self.problem.micro_batch_ms(budgets_LS, self.where).by_micro_batch_2RPVM
        return np.moveaxis(times_2EPVM.sum(axis=0), -1, 1).reshape(self.rows, -1)


@given(SEEDS, SHAPES, st.sampled_from([1, 2]), st.sampled_from([0.0, 0.6, 1.0]))
def test_budgets_are_within_their_limits_and_rise_with_the_level(
    seed, shape, lockstep_ranks, observed
):
    case = Case(seed, shape, lockstep_ranks, observed)
    allowed = case.problem.allowed
    levels = sorted({0, LEVELS, *np.random.default_rng(seed).integers(0, LEVELS, 4).tolist()})
    before_LS = None
    for level in levels:
        budgets_LS = case.budgets_LS(np.full_like(case.level_XC, level))
        assert (allowed.floor_LS <= budgets_LS).all() and (budgets_LS <= allowed.top_LS).all()
        if before_LS is not None:
            assert (budgets_LS >= before_LS).all()
        before_LS = budgets_LS
    assert (np.diff(case.ms_2XCQ) >= 0.0).all()


@given(SEEDS, SHAPES, st.sampled_from([1, 2, 4]))
def test_a_level_takes_what_its_units_say(seed, shape, lockstep_ranks):
    case = Case(seed, shape, min(lockstep_ranks, shape[0]))
    ms_XCQ, level_XC1 = case.ms_2XCQ.sum(axis=0), case.level_XC[..., None]
    expected_XC = np.take_along_axis(ms_XCQ, level_XC1, axis=2)[..., 0]
    found_XC = case.row_ms_XC(case.budgets_LS(case.level_XC))
    np.testing.assert_allclose(found_XC, expected_XC, rtol=1e-6)
    floor_LS = case.problem.allowed.floor_LS
    np.testing.assert_allclose(ms_XCQ[..., 0], case.row_ms_XC(floor_LS), rtol=1e-12)
