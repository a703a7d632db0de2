# SPDX-License-Identifier: Apache-2.0
"""The same coverage in less time: budgets by how much a ms of each unit delays the step.

A unit is one chunk of one slot. What a unit of coverage may cost in a step is one price; what a ms
of a unit costs is how many of the step's longest chains pass through it. Filling
(:mod:`.fill`) knows only whether a unit still fits. Here prices and budgets answer one another in
rounds: given budgets, the flow of the critical chains (:mod:`..schedules.critical_flow`) prices
every unit; given prices, each unit takes the level that is worth most, at the price of coverage at
which all together reach what is wanted. Prices are means of all rounds so far, and the blur of the
flow shrinks, so that budgets settle. The fastest round is kept. Were budgets and levels continuous,
this would be a linear program; ``tests/plan/budgets/test_chain_prices.py`` compares with it.

No transcendental function is used: ranks must agree to the last bit.

Shape legend: Q price levels, S samples, L layers, Z sizes (samples of as many blocks),
R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, C = P x V chunks,
J = R x M slots.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.budgets.fill import Filling
from sparsebalance_megatron.plan.budgets.price_ladder import LEVELS, Ladder
from sparsebalance_megatron.plan.budgets.problem import ROUNDING, BudgetProblem
from sparsebalance_megatron.plan.schedules.critical_flow import critical_flow
from sparsebalance_megatron.plan.schedules.orders import schedule_of
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms
from sparsebalance_megatron.plan.step_costs import StepCosts

ROUNDS = 16
"""More come hardly nearer to the linear program: half of what filling leaves is gained by then."""
LEAST_ROUNDS = 4
"""With fewer, filling is the surer way to less time."""

_ROUND_OPERATIONS = 150_000
_OPERATIONS_PER_TIME = 8
_OPERATIONS_PER_LEVEL = 10
"""What a round takes, in simulated operations: see :mod:`..search_effort`."""

_FIRST_BLUR, _LAST_BLUR = 0.05, 0.01
"""Of the step."""
_LEAST_WEIGHT = 0.15
"""Of the newest round in the mean of flows: that of round n is 1 / n, until then."""
_DOUBLINGS, _HALVINGS = 60, 12
"""Of the price of coverage, to bracket what is wanted and to come near it."""


def round_operations(costs: StepCosts) -> int:
    """What a round takes, in simulated operations."""
    units = costs.job.slots * costs.chunks
    return (
        _ROUND_OPERATIONS
        + 2 * units * _OPERATIONS_PER_TIME
        + units * (LEVELS + 1) * _OPERATIONS_PER_LEVEL
    )


def unit_coverage_JCQ(problem: BudgetProblem, ladder: Ladder, slot_of_S: np.ndarray) -> np.ndarray:
    """Coverage by weight of every unit at price level 0..LEVELS, summed where curves are known."""
    costs, job = problem.costs, problem.costs.job
    levels, layers, sizes = ladder.budgets_QLZ.shape
    budgets_LQZ = ladder.budgets_QLZ.transpose(1, 0, 2).reshape(layers, -1)
    coverage_LQZ = np.nan_to_num(
        problem.coverage.coverage_LS(np.tile(ladder.blocks_Z, levels), budgets_LQZ)
    ).reshape(layers, levels, sizes)
    coverage_JCQ = np.zeros((job.slots, costs.chunks, levels))
    for chunk in range(costs.chunks):
        of_size_ZQ = coverage_LQZ[costs.chunk_of_layer_L == chunk].sum(axis=0).T
        of_sample_SQ = of_size_ZQ[ladder.size_S] * problem.weight_S[:, None]
        np.add.at(coverage_JCQ[:, chunk], slot_of_S, of_sample_SQ)
    return coverage_JCQ


def cheaper_levels_JC(
    filling: Filling,
    coverage_JCQ: np.ndarray,
    start_2RPVM: np.ndarray,
    *,
    wanted_coverage: float,
    rounds: int,
) -> tuple[np.ndarray, float]:
    """Price levels of all units that reach what is wanted, and the step time with them.

    Args:
        coverage_JCQ: of :func:`unit_coverage_JCQ`.
        start_2RPVM: ms of all slots with the budgets that prices start from.
        wanted_coverage: no more than the highest levels reach.
        rounds: at least 1.
    """
    schedule, widths_RM = schedule_of(filling.costs.job), filling.widths_RM
    times_2RPVM = start_2RPVM
    best_ms = float(makespans_ms(times_2RPVM, schedule, widths_RM).max())
    flow_2RPVM = np.zeros_like(times_2RPVM)
    found: tuple[np.ndarray, float] | None = None
    for number in range(rounds):
        blur = _FIRST_BLUR + (_LAST_BLUR - _FIRST_BLUR) * number / max(rounds - 1, 1)
        new_2RPVM = critical_flow(times_2RPVM, schedule, widths_RM, blur * best_ms)
        weight = max(1.0 / (number + 1), _LEAST_WEIGHT)
        flow_2RPVM = (1.0 - weight) * flow_2RPVM + weight * new_2RPVM
        cost_JCQ = filling.pair_price_JC(flow_2RPVM)[..., None] * filling.growth_JCQ
        level_JC = _levels_worth_most_JC(coverage_JCQ, cost_JCQ, wanted_coverage)
        times_2RPVM = filling.times_2RPVM(level_JC)
        ms = float(makespans_ms(times_2RPVM, schedule, widths_RM).max())
        if found is None or ms < found[1]:
            found = level_JC, ms
            best_ms = min(best_ms, ms)
    assert found is not None
    return found


def _levels_worth_most_JC(
    coverage_JCQ: np.ndarray, cost_JCQ: np.ndarray, wanted_coverage: float
) -> np.ndarray:
    """Of every unit the level that is worth most less what it costs, at one price of coverage.

    The least price found at which all reach what is wanted.
    """

    def at(price: float) -> tuple[np.ndarray, bool]:
        level_JC = (price * coverage_JCQ - cost_JCQ).argmax(axis=-1)
        reached = float(np.take_along_axis(coverage_JCQ, level_JC[..., None], -1).sum())
        return level_JC, reached * ROUNDING >= wanted_coverage

    low, high = 0.0, cost_JCQ[..., -1].sum() / coverage_JCQ[..., -1].sum()
    high = max(high, np.finfo(np.float64).tiny)
    for _ in range(_DOUBLINGS):
        level_JC, enough = at(high)
        if enough:
            break
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        middle_JC, enough = at(middle)
        if enough:
            level_JC, high = middle_JC, middle
        else:
            low = middle
    return level_JC
