# SPDX-License-Identifier: Apache-2.0
"""What coverage may cost in a step: one price for all layers and samples of a horizon.

A step of long samples pays more for coverage than one of short samples. One price for the samples
of several steps holds their mean coverage with the least work, so each step wants what its own
samples take at that price. Large global batches are a horizon by themselves.

Shape legend: S samples of the horizon, L layers, Z sizes (samples of as many blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.budgets.price_ladder import LEVELS, Ladder, price_ladder
from sparsebalance_megatron.plan.budgets.problem import ROUNDING, BudgetProblem

HORIZON_SAMPLES = 64
"""Least samples of a horizon; longer horizons gain little and take longer to plan."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """The price of coverage for the own samples of a step.

    ``ladder``: their budgets by price level. ``expected_LS``: budgets to place them by, before
    tuning ``makespan`` knows their places. ``wanted_coverage``: that tuned budgets reach, by
    weight, summed over the layers and samples whose curves are known; -inf where none is wanted.
    """

    ladder: Ladder
    expected_LS: np.ndarray
    wanted_coverage: float


def horizon_steps(global_batch_size: int) -> int:
    """Steps of a horizon, the one that is planned included."""
    return -(-HORIZON_SAMPLES // global_batch_size)


def price(
    problem: BudgetProblem,
    own_samples: slice = slice(None),
    coverage_deficit: float = 0.0,
) -> Pricing:
    """The price of a step whose samples are those of the horizon in ``own_samples``.

    Without a coverage target the slowest rank ends at its floors, and those are expected. With
    target ``base`` it is the least work whose mean coverage, over the horizon, is that of the base
    budgets less the policy's slack, and ``coverage_deficit``, by weight, above it; or below, where
    that is negative.
    """
    ladder = price_ladder(problem)
    own = ladder.of(own_samples)
    if problem.policy.coverage_target != "base":
        floor_LS = problem.allowed.floor_LS[:, own_samples]
        return Pricing(ladder=own, expected_LS=floor_LS, wanted_coverage=-np.inf)

    blocks_Z, weight_Z = ladder.blocks_Z, ladder.sum_Z(problem.weight_S)

    def coverage_Z(budgets_LZ: np.ndarray) -> np.ndarray:
        """Coverage of a sample of each size, summed over layers whose curves are known."""
        return np.nansum(problem.coverage.coverage_LS(blocks_Z, budgets_LZ), axis=0)

    def sum_at(level: int) -> float:
        return float((coverage_Z(ladder.budgets_QLZ[level]) * weight_Z).sum())

    base_LZ = problem.coverage.coverage_LS(blocks_Z, problem.allowed.base_LS[:, ladder.first_Z])
    surplus = coverage_deficit / weight_Z.sum() - problem.policy.coverage_slack
    wanted = float((np.nansum(base_LZ + surplus, axis=0) * weight_Z).sum())
    low, high = -1, LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        enough = sum_at(middle) * ROUNDING >= wanted
        low, high = (low, middle) if enough else (middle, high)
    # Where many steps of budgets have one price, its level takes all of them: go there in part.
    less_Z, more_Z = (coverage_Z(ladder.budgets_QLZ[level]) for level in (max(low, 0), high))
    less, gap = float((less_Z * weight_Z).sum()), float(((more_Z - less_Z) * weight_Z).sum())
    share = min(max((wanted - less) / gap, 0.0), 1.0) if gap > 0.0 else 1.0
    wanted_Z = (1.0 - share) * less_Z + share * more_Z
    return Pricing(
        ladder=own,
        expected_LS=own.common_LS(high),
        wanted_coverage=float((wanted_Z * own.sum_Z(problem.weight_S[own_samples])).sum()),
    )
