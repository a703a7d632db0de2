# SPDX-License-Identifier: Apache-2.0
"""Fills what every rank has left until a step time with attention, best value first.

Shape legend: Q price levels, D ranks, M micro-batches, C = P x V chunks, U = M x C units of a rank,
I ranks looked at, X candidates, P stages, V chunks per stage.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.latency import StepCosts
from sparsebalance_megatron.plan.pipeline import makespans_ms

LEVELS = 64
_COARSE = 8
_MAX_ROUNDS = 24
_MAX_EVALUATED_TIMES = 1 << 21


class Filling:
    """Progressive filling of every rank up to a step time, all ranks at once.

    A unit is one chunk of one slot; its budgets follow one price level: all steps at least that
    good are taken. All units of a rank that still move share their level. In each round the level
    goes as far as the rank's simulated makespan allows; units whose next level alone would exceed
    the step time then stop; of the rest as many as fit together move on by one level and the first
    that does not fit stops. So every round stops a unit or advances a level, and what stops early
    by the limit on rounds is merely left unfilled. Without a pipeline this is greedy by slope.
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
        self.level_DU = np.zeros((ranks, self.units), dtype=np.int64)
        self.moving_DU = self.growth_DUQ[..., -1] > 0

    def run(self, limit_ms: float) -> np.ndarray:
        """Price level of every unit, flat [D * M * C]."""
        for _ in range(_MAX_ROUNDS):
            active_D = np.flatnonzero(self.moving_DU.any(axis=1))
            if not len(active_D):
                break
            self._advance_together(active_D, limit_ms)
            active_D = active_D[self.moving_DU[active_D].any(axis=1)]
            if len(active_D):
                self._stop_single(active_D, limit_ms)
                self._advance_prefix(active_D, limit_ms)
        return self.level_DU.ravel()

    def _fits(self, ranks_I: np.ndarray, level_IXU: np.ndarray, limit_ms: float) -> np.ndarray:
        """Whether rank ``ranks_I[i]`` meets the limit at each of X candidate level vectors."""
        fits_IX = np.empty(level_IXU.shape[:2], dtype=bool)
        per_rank = level_IXU.shape[1] * self.units
        batch = max(1, _MAX_EVALUATED_TIMES // per_rank)
        for first in range(0, len(ranks_I), batch):
            part = slice(first, first + batch)
            ranks = ranks_I[part]
            pairs_IXU = self.growth_DUQ[
                ranks[:, None, None], np.arange(self.units), level_IXU[part]
            ]
            pairs_XMC = pairs_IXU.reshape(-1, self.costs.micro_batches, self.costs.chunks)
            repeat = level_IXU.shape[1]
            forward = np.repeat(self.forward_DPVM[ranks], repeat, axis=0)
            backward = np.repeat(self.backward_DPVM[ranks], repeat, axis=0)
            forward += self.costs.grid_DPVM(pairs_XMC * self.costs.pair_forward_C)
            backward += self.costs.grid_DPVM(pairs_XMC * self.costs.pair_backward_C)
            ms = makespans_ms(forward, backward, schedule=self.schedule)
            fits_IX[part] = (ms <= limit_ms).reshape(len(ranks), repeat)
        return fits_IX

    def _advance_together(self, ranks_I: np.ndarray, limit_ms: float) -> None:
        """The furthest common level that fits: first among coarse levels, then the fine ones."""
        reached_I = np.zeros(len(ranks_I), dtype=np.int64)
        for offsets_X in (np.arange(0, LEVELS + 1, _COARSE), np.arange(_COARSE)):
            target_IX = np.minimum(reached_I[:, None] + offsets_X, LEVELS)
            now_I1U = self.level_DU[ranks_I][:, None, :]
            moved_IXU = np.maximum(target_IX[..., None], now_I1U)
            level_IXU = np.where(self.moving_DU[ranks_I][:, None, :], moved_IXU, now_I1U)
            fits_IX = self._fits(ranks_I, level_IXU, limit_ms)
            best_I = fits_IX.shape[1] - 1 - fits_IX[:, ::-1].argmax(axis=1)
            rows = np.arange(len(ranks_I))
            reached_I = target_IX[rows, best_I]
        self.level_DU[ranks_I] = level_IXU[rows, best_I]
        self.moving_DU &= self.level_DU < LEVELS

    def _stop_single(self, ranks_I: np.ndarray, limit_ms: float) -> None:
        moving_IU = self.moving_DU[ranks_I]
        one_more = np.eye(self.units, dtype=np.int64) * moving_IU[:, None, :]
        level_IXU = self.level_DU[ranks_I][:, None, :] + one_more
        self.moving_DU[ranks_I] &= self._fits(ranks_I, level_IXU, limit_ms)

    def _advance_prefix(self, ranks_I: np.ndarray, limit_ms: float) -> None:
        moving_IU = self.moving_DU[ranks_I]
        prefix = np.tril(np.ones((self.units, self.units), dtype=np.int64))
        level_IXU = self.level_DU[ranks_I][:, None, :] + prefix * moving_IU[:, None, :]
        fits_IX = self._fits(ranks_I, level_IXU, limit_ms)
        count_I = fits_IX.sum(axis=1)
        for row, rank in enumerate(ranks_I.tolist()):
            if count_I[row]:
                self.level_DU[rank] = level_IXU[row, count_I[row] - 1]
            if count_I[row] < self.units:
                self.moving_DU[rank, count_I[row]] = False
        self.moving_DU &= self.level_DU < LEVELS
