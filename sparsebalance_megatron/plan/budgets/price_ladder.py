# SPDX-License-Identifier: Apache-2.0
"""Budgets by price: what every layer and sample takes when coverage costs so much per ms.

Samples of as many blocks have the same curves, floors and prices, so the ladder is one of sizes.

Shape legend: S samples, L layers, K budgets of the grid, Z sizes (samples of as many blocks),
Q price levels, I chains of steps (one per layer and size).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.budgets.envelope import BudgetSteps, budget_steps
from sparsebalance_megatron.plan.budgets.problem import BudgetProblem

LEVELS = 48


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Budgets by price level, 0 (the floors) to LEVELS (everything that gains coverage).

    ``size_S``: the size of every sample. ``first_Z``: a sample of each size, among those that the
    ladder was priced for.
    """

    size_S: np.ndarray
    first_Z: np.ndarray
    budgets_QLZ: np.ndarray

    def budgets_LS(self, level_LS: np.ndarray) -> np.ndarray:
        """Budgets with every layer of every sample at a level of its own."""
        layer_L1 = np.arange(len(level_LS))[:, None]
        return self.budgets_QLZ[level_LS, layer_L1, self.size_S]

    def of(self, samples: slice) -> Ladder:
        """That of some of the samples."""
        return replace(self, size_S=self.size_S[samples])

    def common_LS(self, level: int) -> np.ndarray:
        """Budgets with all at one level: no other budgets cover as much in as little time."""
        return self.budgets_QLZ[level][:, self.size_S]

    @property
    def samples_Z(self) -> np.ndarray:
        """How many samples are of each size."""
        return np.bincount(self.size_S, minlength=len(self.first_Z))


def price_ladder(problem: BudgetProblem) -> Ladder:
    """The ladder of a problem's samples.

    Prices are those of whole blocks; a ragged last block makes no difference to the ranking.
    """
    costs, allowed = problem.costs, problem.allowed
    blocks_Z, first_Z, size_S = np.unique(costs.blocks_S, return_index=True, return_inverse=True)
    whole = replace(costs, lengths_tokens_S=blocks_Z * costs.block_size, blocks_S=blocks_Z)
    floor_LZ = allowed.floor_LS[:, first_Z]
    steps = budget_steps(whole, problem.coverage, floor_LZ, allowed.top_LS[:, first_Z])
    return Ladder(size_S=size_S.reshape(-1), first_Z=first_Z, budgets_QLZ=_budgets_by_level(steps))


def _budgets_by_level(steps: BudgetSteps) -> np.ndarray:
    """The budget that each chain has reached once all its steps up to a level are taken, [Q, ...].

    The slope of a chain never rises, so neither do its levels fall: a step's point may simply be
    written down at its level, later points over earlier ones, and holds until the next level that
    has one.
    """
    points = steps.points_LSK.shape[-1]
    level_KI = _levels(steps).reshape(-1, points).T
    point_KI = steps.points_LSK.reshape(-1, points).T
    never_taken = LEVELS + 1
    budgets_QI = np.zeros((never_taken + 1, level_KI.shape[1]), dtype=np.int64)
    chain_I = np.arange(level_KI.shape[1])
    for level_I, point_I in zip(level_KI, point_KI, strict=True):
        budgets_QI[level_I, chain_I] = point_I
    budgets_QI[0] = steps.low_LS.ravel()
    reached_QI = np.maximum.accumulate(budgets_QI[:never_taken], axis=0)
    return reached_QI.reshape(-1, *steps.low_LS.shape)


def _levels(steps: BudgetSteps) -> np.ndarray:
    """Price level 1..LEVELS of every step, best slope first; beyond that: never worth taking.

    Levels are quantiles of the slope, so that each holds about as many steps. Steps that gain
    nothing are worth nothing.
    """
    worth_LSK = (steps.pairs_LSK > 0) & (steps.slope_LSK > 0)
    slopes = steps.slope_LSK[worth_LSK]
    level_LSK = np.full(worth_LSK.shape, LEVELS + 1)
    if len(slopes):
        ranks = np.linspace(0, len(slopes) - 1, LEVELS).astype(np.int64)
        edges = np.unique(np.sort(slopes)[ranks])
        level_LSK[worth_LSK] = len(edges) - np.searchsorted(edges, slopes, side="right") + 1
    return level_LSK
