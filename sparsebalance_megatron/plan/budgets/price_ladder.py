# SPDX-License-Identifier: Apache-2.0
"""Budgets by price: what every layer and sample takes when coverage costs so much per ms.

Shape legend: S samples, L layers, K grid budgets, I chains, Q price levels, R rows (samples of as
many blocks), D ranks, M micro-batches, P stages, V chunks per stage, J = D x M slots, C = P x V
chunks, U = J x C units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.budgets.envelope import BudgetSteps, budget_steps
from sparsebalance_megatron.plan.budgets.feasible import BudgetRange
from sparsebalance_megatron.plan.budgets.fill import LEVELS
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import StepCosts


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Budgets by price level, 0 (the floors) to LEVELS (everything that gains coverage).

    Samples of as many blocks share a row R: curves, floors and prices are theirs alike. The first
    of them is ``first_R``, wherever the ladder was priced.
    """

    row_S: np.ndarray
    first_R: np.ndarray
    budgets_QLR: np.ndarray

    def budgets_LS(self, level_LS: np.ndarray) -> np.ndarray:
        """Budgets with every layer of every sample at a level of its own."""
        layer_L1 = np.arange(len(level_LS))[:, None]
        return self.budgets_QLR[level_LS, layer_L1, self.row_S]

    def of(self, samples: slice) -> Ladder:
        """That of some of the samples."""
        return replace(self, row_S=self.row_S[samples])

    def common_LS(self, level: int) -> np.ndarray:
        """Budgets with all at one level: no other budgets cover as much in as little time."""
        return self.budgets_QLR[level][:, self.row_S]

    @property
    def samples_R(self) -> np.ndarray:
        """How many samples are of each row."""
        return np.bincount(self.row_S, minlength=len(self.first_R))


def price_ladder(costs: StepCosts, coverage: CoverageCurves, allowed: BudgetRange) -> Ladder:
    """Prices are those of whole blocks; a ragged last block makes no difference to the ranking."""
    blocks_R, first_R, row_S = np.unique(costs.blocks_S, return_index=True, return_inverse=True)
    whole = replace(costs, lengths_tokens_S=blocks_R * costs.block_size, blocks_S=blocks_R)
    steps = budget_steps(whole, coverage, allowed.floor_LS[:, first_R], allowed.top_LS[:, first_R])
    points = steps.points_LSK.shape[-1]
    level_KI = _levels(steps).reshape(-1, points).T
    points_KI = steps.points_LSK.reshape(-1, points).T
    budgets_QI = np.zeros((LEVELS + 2, level_KI.shape[1]), dtype=np.int64)
    chain_I = np.arange(level_KI.shape[1])
    for level_I, point_I in zip(level_KI, points_KI, strict=True):
        budgets_QI[level_I, chain_I] = point_I
    budgets_QI[0] = steps.low_LS.ravel()
    budgets_QI = np.maximum.accumulate(budgets_QI[: LEVELS + 1], axis=0)
    return Ladder(
        row_S=row_S.reshape(-1),
        first_R=first_R,
        budgets_QLR=budgets_QI.reshape(-1, *steps.low_LS.shape),
    )


def _levels(steps: BudgetSteps) -> np.ndarray:
    """Price level 1..LEVELS of every step, best slope first; beyond that: never worth taking.

    Levels are quantiles of the slope, so that each holds about as many steps. Steps that gain
    nothing are worth nothing.
    """
    worth_LSK = (steps.pairs_LSK > 0) & (steps.slope_LSK > 0)
    slopes_I = steps.slope_LSK[worth_LSK]
    level_LSK = np.full(worth_LSK.shape, LEVELS + 1)
    if len(slopes_I):
        ranks = np.linspace(0, len(slopes_I) - 1, LEVELS).astype(np.int64)
        edges = np.unique(np.sort(slopes_I)[ranks])
        level_LSK[worth_LSK] = len(edges) - np.searchsorted(edges, slopes_I, side="right") + 1
    return level_LSK


def growth_UQ(costs: StepCosts, ladder: Ladder, slot_of_S: np.ndarray) -> np.ndarray:
    """Block pairs that each unit (slot, chunk) adds above its floors at price level 0..LEVELS.

    At budgets up to the sample's blocks, the pairs of x blocks (fractional) at budget k are
    ``x k - k (k - 1) / 2`` and a term without k, so a chunk needs two sums over its layers only.
    """
    order_S = np.argsort(slot_of_S, kind="stable")
    slots = costs.data_parallel_size * costs.micro_batches
    first_J = np.searchsorted(slot_of_S[order_S], np.arange(slots))
    length_S = (costs.lengths_tokens_S / costs.block_size)[order_S]
    row_S = ladder.row_S[order_S]
    growth_QJC = np.empty((LEVELS + 1, slots, costs.chunks))
    for chunk in range(costs.chunks):
        budgets_QIR = ladder.budgets_QLR[:, costs.chunk_of_layer_L == chunk]
        sum_QR = budgets_QIR.sum(axis=1)
        lost_QR = (budgets_QIR * (budgets_QIR - 1) // 2).sum(axis=1)
        sum_QR, lost_QR = sum_QR - sum_QR[0], lost_QR - lost_QR[0]
        pairs_QS = length_S * sum_QR[:, row_S] - lost_QR[:, row_S]
        growth_QJC[..., chunk] = np.add.reduceat(pairs_QS, first_J, axis=1)
    return growth_QJC.reshape(LEVELS + 1, slots * costs.chunks).T.copy()
