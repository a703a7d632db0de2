# SPDX-License-Identifier: Apache-2.0
"""Budgets by chain prices: as much coverage in less time, and hardly more than the least."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.budget_program import least_makespan_ms
from plan.plan_cases import (
    cost_model,
    coverage_curves,
    job_shape,
    policy,
    random_lengths,
    random_widths,
)

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.budgets.chain_prices import (
    cheaper_levels_JC,
    round_operations,
    unit_coverage_JCQ,
)
from sparsebalance_megatron.plan.budgets.fill import Filling, unit_growth_JCQ
from sparsebalance_megatron.plan.budgets.price import price
from sparsebalance_megatron.plan.budgets.price_ladder import LEVELS, price_ladder
from sparsebalance_megatron.plan.budgets.problem import BudgetProblem
from sparsebalance_megatron.plan.budgets.tune import tune
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.schedules.orders import schedule_of
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms
from sparsebalance_megatron.plan.search_effort import OPERATIONS_PER_MS
from sparsebalance_megatron.plan.step_costs import step_costs

SHAPES = [((4, 4, 2, 1), 1), ((2, 6, 4, 1), 2), ((4, 6, 3, 1), 4)]
"""(ranks, micro-batches, stages, chunks), and the widest slot."""


class Placed:
    """Samples in slots of random widths, filled up to a time between floors and base budgets."""

    def __init__(self, shape, widest, seed, *, observed=1.0, mean_over="samples"):
        ranks, positions, _, _ = shape
        self.job = job_shape(*shape)
        widths_RM = random_widths(ranks, positions, widest, seed)
        self.widths_RM = widths_RM if widest > 1 else None
        self.places_RM = first_places(widths_RM).reshape(ranks, positions)
        slots = np.unique(self.places_RM)
        generator = np.random.default_rng(seed)
        lengths = random_lengths(len(slots) * 2, seed, longest=20000)
        self.slot_of_S = np.concatenate([slots, generator.choice(slots, len(slots))])
        scales = StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages)
        self.costs = step_costs(lengths, self.job, cost_model(), scales)
        curves = coverage_curves(self.job.layers, 400, seed=seed, observed=observed)
        chosen = policy(coverage_target="base", coverage_mean_over=mean_over)
        self.problem = BudgetProblem.under(chosen, self.costs, curves)
        self.ladder = price_ladder(self.problem)
        self.filling = Filling(
            costs=self.costs,
            floor_2RPVM=self.times(self.problem.allowed.floor_LS),
            growth_JCQ=unit_growth_JCQ(self.costs, self.ladder, self.slot_of_S),
            widths_RM=self.widths_RM,
        )
        self.coverage_JCQ = unit_coverage_JCQ(self.problem, self.ladder, self.slot_of_S)
        self.unit_LS = self.slot_of_S * self.costs.chunks + self.costs.chunk_of_layer_L[:, None]

    def times(self, budgets_LS):
        return self.problem.slot_ms(budgets_LS, self.slot_of_S, self.widths_RM)

    def makespan_ms(self, times):
        return float(makespans_ms(times, schedule_of(self.job), self.widths_RM).max())

    def budgets_LS(self, level_JC):
        return self.ladder.budgets_LS(level_JC.ravel()[self.unit_LS])

    def filled(self, share):
        """Levels of filling up to a part of the way from floors to base budgets, and the time."""
        floor_ms = self.makespan_ms(self.filling.floor_2RPVM)
        base_ms = self.makespan_ms(self.times(self.problem.allowed.base_LS))
        level_JC = self.filling.levels_JC(floor_ms + share * (base_ms - floor_ms))
        return level_JC, self.makespan_ms(self.filling.times_2RPVM(level_JC))

    def owed(self, share):
        """By how much coverage of so filled slots exceeds that of base budgets, per layer."""
        filled = self.problem.covered(self.budgets_LS(self.filled(share)[0]))
        return (filled - self.problem.covered(self.problem.allowed.base_LS)) / self.job.layers

    def least_ms(self, wanted):
        """The linear program's answer."""
        levels = range(LEVELS + 1)
        slots = np.unique(self.places_RM).tolist()
        forward_ms, backward_ms, coverage = [], [], []
        for slot in slots:
            rank, position = divmod(slot, self.job.micro_batches)
            for stage in range(self.job.pipeline_stages):
                times = [
                    self.filling.times_2RPVM(np.full(self.coverage_JCQ.shape[:2], level))[
                        :, rank, stage, 0, position
                    ]
                    for level in levels
                ]
                forward_ms.append([time[0] for time in times])
                backward_ms.append([time[1] for time in times])
                coverage.append(self.coverage_JCQ[slot, stage])
        order = [
            [(each.direction is Direction.BACKWARD, each.micro_batch) for each in stage]
            for stage in schedule_of(self.job)(
                self.job.pipeline_stages, self.job.micro_batches, 1
            ).by_stage
        ]
        placed = [[slots.index(place) for place in rank] for rank in self.places_RM.tolist()]
        return least_makespan_ms(forward_ms, backward_ms, coverage, placed, order, wanted)


@pytest.mark.parametrize(("case", "part"), list(zip(SHAPES, [0.2, 0.5, 0.5], strict=True)))
def test_much_of_what_filling_leaves_is_gained(case, part):
    """Against the least time of all, for the coverage that filling reaches.

    With a few large steps of budgets in each slot, the program has much that no levels reach.
    """
    shape, widest = case
    left, gained = [], []
    for seed in range(6):
        case = Placed(shape, widest, seed)
        level_JC, filled_ms = case.filled(0.6)
        times = case.filling.times_2RPVM(level_JC)
        covered = case.problem.covered(case.budgets_LS(level_JC))
        found_JC, found_ms = cheaper_levels_JC(
            case.filling, case.coverage_JCQ, times, wanted_coverage=covered, rounds=16
        )
        assert case.problem.covered(case.budgets_LS(found_JC)) >= covered * (1 - 1e-8)
        assert found_ms == pytest.approx(
            case.makespan_ms(case.times(case.budgets_LS(found_JC))), rel=1e-9
        )
        least_ms = case.least_ms(covered)
        assert min(filled_ms, found_ms) >= least_ms * (1 - 1e-9)
        left.append(filled_ms - least_ms)
        gained.append(filled_ms - min(filled_ms, found_ms))
    assert sum(gained) >= part * sum(left)


@pytest.mark.parametrize("mean_over", ["samples", "tokens"])
@pytest.mark.parametrize("observed", [1.0, 0.6])
def test_units_cover_what_their_samples_do(observed, mean_over):
    """By weight, and where curves are known."""
    case = Placed((2, 4, 2, 2), 1, 3, observed=observed, mean_over=mean_over)
    generator = np.random.default_rng(0)
    level_JC = generator.integers(0, LEVELS + 1, case.coverage_JCQ.shape[:2])
    summed = np.take_along_axis(case.coverage_JCQ, level_JC[..., None], -1).sum()
    covered = case.problem.covered(case.budgets_LS(level_JC))
    assert summed == pytest.approx(covered, rel=1e-12)


def test_a_pair_costs_what_it_delays():
    """A unit with all of the flow delays the step by what a pair takes on each of its ranks."""
    case = Placed((4, 4, 2, 1), 4, 1)
    price_JC = case.filling.pair_price_JC(np.ones_like(case.filling.floor_2RPVM))
    widths = case.widths_RM.ravel()
    for slot in np.unique(case.places_RM):
        width = widths[slot]
        wanted = case.costs.pair_2C.sum(axis=0) * case.costs.share_W[width] * width
        np.testing.assert_allclose(price_JC[slot], wanted, rtol=1e-12)
    slower = replace(case.costs, slowness_RP=np.full((4, 2), 1.5))
    filling = replace(case.filling, costs=slower)
    slow_JC = filling.pair_price_JC(np.ones_like(case.filling.floor_2RPVM))
    np.testing.assert_allclose(slow_JC, 1.5 * price_JC)


def test_filling_goes_on_from_levels_that_fit():
    case = Placed((2, 6, 4, 1), 2, 0)
    level_JC, ms = case.filled(0.3)
    _, later_ms = case.filled(0.7)
    more_JC = case.filling.levels_JC(later_ms, level_JC)
    assert (more_JC >= level_JC).all()
    assert more_JC.sum() > level_JC.sum()
    assert ms < case.makespan_ms(case.filling.times_2RPVM(more_JC)) <= later_ms * (1 + 1e-12)
    assert (case.filling.levels_JC(ms * (1 - 1e-3), level_JC) >= level_JC).all()


@pytest.mark.parametrize(("shape", "widest"), SHAPES)
def test_tuned_budgets_take_less_time_where_there_is_effort(shape, widest):
    """And still reach what is wanted; without effort they are those of filling."""
    changed = 0
    for seed in range(4):
        case = Placed(shape, widest, seed)
        rounds_ms = 17 * round_operations(case.costs) / OPERATIONS_PER_MS
        found = {}
        for plan_ms in (0.0, rounds_ms):
            problem = replace(case.problem, policy=replace(case.problem.policy, plan_ms=plan_ms))
            pricing = price(problem, owed_coverage=case.owed(0.6))
            tuned = tune(problem, case.slot_of_S, pricing, case.widths_RM)
            effective_LS = np.minimum(tuned.budgets_LS, case.costs.blocks_S)
            covered = problem.covered(effective_LS)
            found[plan_ms] = case.makespan_ms(case.times(effective_LS)), covered
        (filled_ms, filled_coverage), (ms, coverage) = found.values()
        assert ms <= filled_ms
        assert coverage >= min(filled_coverage, pricing.wanted_coverage) * (1 - 1e-8)
        changed += ms < filled_ms
    assert changed >= 2
