# SPDX-License-Identifier: Apache-2.0
"""Fills what every rank has left until a step time with attention, best value first.

Shape legend: Q price levels, D ranks, M micro-batches, C = P x V chunks, U = M x C units of a rank,
I ranks looked at, X candidates, P stages, V chunks per stage.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.schedules.simulator import longest_through_ms, makespans_ms
from sparsebalance_megatron.plan.step_costs import StepCosts

LEVELS = 48
_STRIDES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
_MAX_ROUNDS = 24
_MAX_EVALUATED_TIMES = 1 << 21


class Filling:
    """Progressive filling of every rank up to a step time, all ranks at once.

    A unit is one chunk of one slot; its budgets follow one price level: all steps at least that
    good are taken. All units of a rank that still move share their level. In each round the level
    goes as far as the rank's simulated makespan allows, by one of a few strides. Then units stop
    whose next level alone would exceed the step time, by the longest chain through them. Where
    each fits alone but the level could not move, the more expensive half stops of those that could
    exceed it together. So every round stops a unit or advances a level, and what stops early by
    the limit on rounds is merely left unfilled. Without a pipeline this is greedy by slope.
    """

    def __init__(
        self,
        costs: StepCosts,
        schedule: str,
        forward_DPVM: np.ndarray,
        backward_DPVM: np.ndarray,
        growth_UQ: np.ndarray,
    ) -> None:
        self.costs = costs
        self.schedule = schedule
        self.forward_DPVM, self.backward_DPVM = forward_DPVM, backward_DPVM
        ranks = costs.data_parallel_size
        self.growth_DUQ = growth_UQ.reshape(ranks, -1, growth_UQ.shape[1])
        self.units = self.growth_DUQ.shape[1]
        pair_ms_C = costs.pair_forward_C + costs.pair_backward_C
        slowness_DC = np.repeat(costs.slowness_DP, costs.virtual_stages, axis=1)
        self.pair_ms_DU = np.tile(pair_ms_C * slowness_DC, (1, costs.micro_batches))

    def run(self, limit_ms: float) -> np.ndarray:
        """Price level of every unit, flat [D * M * C]; from the floors, whatever ran before."""
        self.level_DU = np.zeros(self.growth_DUQ.shape[:2], dtype=np.int64)
        self.moving_DU = self.growth_DUQ[..., -1] > 0
        for _ in range(_MAX_ROUNDS):
            active_D = np.flatnonzero(self.moving_DU.any(axis=1))
            if not len(active_D):
                break
            stalled_I = self._advance(active_D, limit_ms)
            self._stop(active_D, stalled_I, limit_ms)
        return self.level_DU.ravel()

    def _times(self, ranks_I: np.ndarray, level_IXU: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward ms [I * X, P, V, M] of ranks at X level vectors each."""
        pairs_IXU = self.growth_DUQ[ranks_I[:, None, None], np.arange(self.units), level_IXU]
        pairs_XMC = pairs_IXU.reshape(-1, self.costs.micro_batches, self.costs.chunks)
        repeat = level_IXU.shape[1]
        forward = np.repeat(self.forward_DPVM[ranks_I], repeat, axis=0)
        backward = np.repeat(self.backward_DPVM[ranks_I], repeat, axis=0)
        ranks_X = np.repeat(ranks_I, repeat)
        forward += self.costs.grid_IPVM(pairs_XMC * self.costs.pair_forward_C, ranks_X)
        backward += self.costs.grid_IPVM(pairs_XMC * self.costs.pair_backward_C, ranks_X)
        return forward, backward

    def _fits(self, ranks_I: np.ndarray, level_IXU: np.ndarray, limit_ms: float) -> np.ndarray:
        """Whether rank ``ranks_I[i]`` meets the limit at each of X candidate level vectors."""
        fits_IX = np.empty(level_IXU.shape[:2], dtype=bool)
        batch = max(1, _MAX_EVALUATED_TIMES // (level_IXU.shape[1] * self.units))
        for first in range(0, len(ranks_I), batch):
            part = slice(first, first + batch)
            ms = makespans_ms(*self._times(ranks_I[part], level_IXU[part]), schedule=self.schedule)
            fits_IX[part] = (ms <= limit_ms).reshape(-1, level_IXU.shape[1])
        return fits_IX

    def _advance(self, ranks_I: np.ndarray, limit_ms: float) -> np.ndarray:
        """Move the common level by the largest stride that fits; which ranks did not move, [I]."""
        moving_I1U = self.moving_DU[ranks_I][:, None, :]
        now_I1U = self.level_DU[ranks_I][:, None, :]
        level_IXU = now_I1U + np.where(moving_I1U, _STRIDES[:, None], 0)
        np.minimum(level_IXU, LEVELS, out=level_IXU)
        fits_IX = self._fits(ranks_I, level_IXU, limit_ms)
        moved_I = fits_IX[:, 0]
        best_I = fits_IX.sum(axis=1) - 1
        self.level_DU[ranks_I[moved_I]] = level_IXU[moved_I, best_I[moved_I]]
        self.moving_DU &= self.level_DU < LEVELS
        return ~moved_I

    def _stop(self, ranks_I: np.ndarray, stalled_I: np.ndarray, limit_ms: float) -> None:
        moving_IU, level_IU = self.moving_DU[ranks_I], self.level_DU[ranks_I]
        times = self._times(ranks_I, level_IU[:, None, :])
        through_IPVM = longest_through_ms(*times, schedule=self.schedule)
        through_IU = through_IPVM.transpose(0, 3, 1, 2).reshape(len(ranks_I), -1)
        units = np.arange(self.units)
        following_IU = np.minimum(level_IU + 1, LEVELS)
        added_IU = (
            self.growth_DUQ[ranks_I[:, None], units, following_IU]
            - self.growth_DUQ[ranks_I[:, None], units, level_IU]
        ) * self.pair_ms_DU[ranks_I]
        fits_IU = through_IU + added_IU <= limit_ms
        together_I1 = np.where(moving_IU, added_IU, 0.0).sum(axis=1, keepdims=True)
        in_conflict_IU = moving_IU & (through_IU + together_I1 > limit_ms)
        in_conflict_IU &= stalled_I[:, None] & (fits_IU | ~moving_IU).all(axis=1, keepdims=True)
        largest_IU = _larger_half(added_IU, in_conflict_IU)
        self.moving_DU[ranks_I] = moving_IU & fits_IU & ~largest_IU


def _larger_half(values_IU: np.ndarray, among_IU: np.ndarray) -> np.ndarray:
    """The larger half of each row's marked entries, rounded up."""
    order_IU = np.argsort(np.where(among_IU, -values_IU, np.inf), axis=1, kind="stable")
    count_I1 = (among_IU.sum(axis=1, keepdims=True) + 1) // 2
    chosen_IU = np.zeros_like(among_IU)
    np.put_along_axis(chosen_IU, order_IU, np.arange(values_IU.shape[1]) < count_I1, axis=1)
    return chosen_IU
