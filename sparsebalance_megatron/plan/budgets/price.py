# SPDX-License-Identifier: Apache-2.0
"""What coverage may cost in a step: one price for all layers and samples of a horizon.

A step of long samples pays more for coverage than one of short samples. One price for the samples
of several steps holds their mean coverage with the least work, so each step wants what its own
samples take at that price. Large global batches are a horizon by themselves.

Shape legend: S samples of the horizon, L layers, R rows of the ladder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.budgets.feasible import BudgetRange
from sparsebalance_megatron.plan.budgets.fill import LEVELS
from sparsebalance_megatron.plan.budgets.price_ladder import Ladder, price_ladder
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import PlanPolicy

HORIZON_SAMPLES = 64
"""At least; longer horizons gain little and take longer to plan."""

ROUNDING = 1.0 + 1e-9
"""Above what sums of the same numbers in another order differ by."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Of the own samples of a step.

    ``ladder``: their budgets by price level. ``expected_LS``: budgets to place them by, before
    tuning ``makespan`` knows their places. ``wanted_coverage``: that tuned budgets reach, summed
    over the layers and samples whose curves are known; -inf where none is wanted.
    """

    ladder: Ladder
    expected_LS: np.ndarray
    wanted_coverage: float


def horizon_steps(global_batch_size: int) -> int:
    """Steps of a horizon, the one that is planned included."""
    return -(-HORIZON_SAMPLES // global_batch_size)


def price(
    policy: PlanPolicy,
    costs: StepCosts,
    coverage: CoverageCurves,
    allowed: BudgetRange,
    own_samples: slice = slice(None),
    owed_coverage: float = 0.0,
) -> Pricing:
    """Price a step whose samples are those of a horizon in ``own_samples``; by default all.

    Without a coverage target the slowest rank ends at its floors, and those are expected. With
    target ``base`` it is the least work whose mean coverage, over the horizon, is that of the base
    budgets and ``owed_coverage``, summed over samples, above it; or below, where that is negative.
    """
    ladder = price_ladder(costs, coverage, allowed)
    own = ladder.of(own_samples)
    if policy.coverage_target != "base":
        floor_LS = allowed.floor_LS[:, own_samples]
        return Pricing(ladder=own, expected_LS=floor_LS, wanted_coverage=-np.inf)

    blocks_R, samples_R = costs.blocks_S[ladder.first_R], ladder.samples_R

    def sum_R(budgets_LR: np.ndarray) -> np.ndarray:
        """Of a sample of each row, over layers whose curves are known."""
        return np.nansum(coverage.coverage_LS(blocks_R, budgets_LR), axis=0)

    def sum_at(level: int) -> float:
        return float((sum_R(ladder.budgets_QLR[level]) * samples_R).sum())

    base_LR = coverage.coverage_LS(blocks_R, allowed.base_LS[:, ladder.first_R])
    surplus = owed_coverage / samples_R.sum()
    wanted = float((np.nansum(base_LR + surplus, axis=0) * samples_R).sum())
    low, high = -1, LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        enough = sum_at(middle) * ROUNDING >= wanted
        low, high = (low, middle) if enough else (middle, high)
    # Where many steps of budgets have one price, its level takes all of them: go there in part.
    less_R, more_R = (sum_R(ladder.budgets_QLR[level]) for level in (max(low, 0), high))
    less, gap = float((less_R * samples_R).sum()), float(((more_R - less_R) * samples_R).sum())
    share = min(max((wanted - less) / gap, 0.0), 1.0) if gap > 0.0 else 1.0
    wanted_R = (1.0 - share) * less_R + share * more_R
    return Pricing(
        ladder=own,
        expected_LS=own.common_LS(high),
        wanted_coverage=float((wanted_R * own.samples_R).sum()),
    )


def reaches(
    coverage: CoverageCurves, costs: StepCosts, budgets_LS: np.ndarray, wanted_coverage: float
) -> bool:
    """Whether expected coverage, summed where curves are known, is at least what is wanted."""
    reached_LS = coverage.coverage_LS(costs.blocks_S, budgets_LS)
    return bool(np.nansum(reached_LS) * ROUNDING >= wanted_coverage)
