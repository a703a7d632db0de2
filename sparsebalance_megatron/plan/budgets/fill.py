# SPDX-License-Identifier: Apache-2.0
"""Fills what every rank has left until a step time with attention, best value first.

A unit is one chunk of one slot. Its budgets follow one price level: all steps at least that good
are taken. The rule, for every rank by itself, in rounds:

1. *Rise.* The units of the rank rise together, by as many levels as its makespan allows.
2. *Stop.* A unit stops whose next level does not fit: the longest chain of operations through it
   would end after the step.
3. *Give way.* Where the units could not rise together though each of them could alone, the more
   expensive half stops of those that all of them together might delay.

So every round lifts or stops a unit. Without a pipeline this is greedy by slope.

Shape legend: Q price levels, S samples, L layers, Z sizes (samples of as many blocks),
R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, C = P x V chunks,
J = R x M slots, U = M x C units of a rank, I ranks that still rise, X candidates; a leading 2:
forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.budgets.price_ladder import LEVELS, Ladder
from sparsebalance_megatron.plan.schedules.simulator import longest_through_ms, makespans_ms
from sparsebalance_megatron.plan.step_costs import StepCosts

_STRIDES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
_MAX_ROUNDS = 24
"""What rises after that is left where it is."""
_MAX_EVALUATED_TIMES = 1 << 21


def unit_growth_RUQ(costs: StepCosts, ladder: Ladder, slot_of_S: np.ndarray) -> np.ndarray:
    """Block pairs that each unit adds above its floors at price level 0..LEVELS.

    Its pairs are ``sum_S (length_S a_S - b_S)``, where a and b are the sums over the chunk's layers
    of the terms of :meth:`.WorkModel.growth`.
    """
    order_S = np.argsort(slot_of_S, kind="stable")
    first_J = np.searchsorted(slot_of_S[order_S], np.arange(costs.job.slots))
    length_S, size_S = costs.length_blocks_S[order_S], ladder.size_S[order_S]
    growth_QJC = np.empty((LEVELS + 1, costs.job.slots, costs.chunks))
    for chunk in range(costs.chunks):
        terms = costs.work.growth(ladder.budgets_QLZ[:, costs.chunk_of_layer_L == chunk])
        a_QZ, b_QZ = (term_QLZ.sum(axis=1) for term_QLZ in terms)
        a_QZ, b_QZ = a_QZ - a_QZ[0], b_QZ - b_QZ[0]
        pairs_QS = length_S * a_QZ[:, size_S] - b_QZ[:, size_S]
        growth_QJC[..., chunk] = np.add.reduceat(pairs_QS, first_J, axis=1)
    growth_UQ = growth_QJC.reshape(LEVELS + 1, -1).T.copy()
    return growth_UQ.reshape(costs.job.data_parallel_size, -1, LEVELS + 1)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Pipelines to fill.

    ``floor_2RPVM``: ms of all slots at their floors. ``growth_RUQ``: of :func:`unit_growth_RUQ`.
    """

    costs: StepCosts
    floor_2RPVM: np.ndarray
    growth_RUQ: np.ndarray

    def levels_RU(self, limit_ms: float) -> np.ndarray:
        """The price level of every unit once all ranks are filled up to ``limit_ms``.

        Units of a rank are ordered by micro-batch, then chunk.
        """
        level_RU = np.zeros(self.growth_RUQ.shape[:2], dtype=np.int64)
        rising_RU = self.growth_RUQ[..., -1] > 0
        for _ in range(_MAX_ROUNDS):
            ranks_I = np.flatnonzero(rising_RU.any(axis=1))
            if not len(ranks_I):
                break
            rising_IU = rising_RU[ranks_I]
            level_IU, rose_I = self._rise(ranks_I, level_RU[ranks_I], rising_IU, limit_ms)
            rising_IU = rising_IU & (level_IU < LEVELS)
            level_RU[ranks_I] = level_IU
            rising_RU[ranks_I] = self._go_on(ranks_I, level_IU, rising_IU, rose_I, limit_ms)
        return level_RU

    def _rise(
        self, ranks_I: np.ndarray, level_IU: np.ndarray, rising_IU: np.ndarray, limit_ms: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Levels after the largest common stride that fits, and which ranks rose at all, [I]."""
        stride_IXU = np.where(rising_IU[:, None], _STRIDES[:, None], 0)
        candidate_IXU = np.minimum(level_IU[:, None] + stride_IXU, LEVELS)
        fits_IX = self._fits(ranks_I, candidate_IXU, limit_ms)
        rose_I = fits_IX[:, 0]
        largest_I = np.maximum(fits_IX.sum(axis=1) - 1, 0)
        risen_IU = candidate_IXU[np.arange(len(ranks_I)), largest_I]
        return np.where(rose_I[:, None], risen_IU, level_IU), rose_I

    def _go_on(
        self,
        ranks_I: np.ndarray,
        level_IU: np.ndarray,
        rising_IU: np.ndarray,
        rose_I: np.ndarray,
        limit_ms: float,
    ) -> np.ndarray:
        """Which of the rising units rise in the next round as well, [I, U]."""
        times_2IPVM = self._times_2XPVM(ranks_I, level_IU[:, None])
        through_IPVM = longest_through_ms(times_2IPVM)
        through_IU = through_IPVM.transpose(0, 3, 1, 2).reshape(level_IU.shape)
        added_IU = self._next_level_ms(ranks_I, level_IU)
        fits_IU = through_IU + added_IU <= limit_ms
        together_I1 = np.where(rising_IU, added_IU, 0.0).sum(axis=1, keepdims=True)
        stuck_I = ~rose_I & (fits_IU | ~rising_IU).all(axis=1)
        in_the_way_IU = rising_IU & (through_IU + together_I1 > limit_ms) & stuck_I[:, None]
        return rising_IU & fits_IU & ~_larger_half(added_IU, in_the_way_IU)

    def _fits(self, ranks_I: np.ndarray, level_IXU: np.ndarray, limit_ms: float) -> np.ndarray:
        """Whether each rank meets the limit at each of X candidate levels of its units, [I, X]."""
        _, candidates, units = level_IXU.shape
        fits_IX = np.empty(level_IXU.shape[:2], dtype=bool)
        batch = max(1, _MAX_EVALUATED_TIMES // (candidates * units))
        for first in range(0, len(ranks_I), batch):
            part = slice(first, first + batch)
            ms_X = makespans_ms(self._times_2XPVM(ranks_I[part], level_IXU[part]))
            fits_IX[part] = (ms_X <= limit_ms).reshape(-1, candidates)
        return fits_IX

    def _times_2XPVM(self, ranks_I: np.ndarray, level_IXU: np.ndarray) -> np.ndarray:
        """Ms of ranks with their units at X candidate levels each, I x X pipelines."""
        _, candidates, units = level_IXU.shape
        pairs_IXU = self.growth_RUQ[ranks_I[:, None, None], np.arange(units), level_IXU]
        pairs_XMC = pairs_IXU.reshape(-1, self.costs.job.micro_batches, self.costs.chunks)
        times_2XPVM = np.repeat(self.floor_2RPVM[:, ranks_I], candidates, axis=1)
        times_2XPVM += self.costs.grid_2IPVM(
            pairs_XMC * self.costs.pair_2C[:, None, None], np.repeat(ranks_I, candidates)
        )
        return times_2XPVM

    def _next_level_ms(self, ranks_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        """Forward and backward ms that one more level adds to every unit, [I, U]."""
        units = np.arange(level_IU.shape[1])
        now_IU, next_IU = (
            self.growth_RUQ[ranks_I[:, None], units, np.minimum(level_IU + more, LEVELS)]
            for more in (0, 1)
        )
        return (next_IU - now_IU) * self._pair_ms_RU[ranks_I]

    @cached_property
    def _pair_ms_RU(self) -> np.ndarray:
        slowness_RC = np.repeat(self.costs.slowness_RP, self.costs.job.virtual_stages, axis=1)
        return np.tile(self.costs.pair_ms_C * slowness_RC, (1, self.costs.job.micro_batches))


def _larger_half(values_IU: np.ndarray, among_IU: np.ndarray) -> np.ndarray:
    """The larger half of each row's marked entries, rounded up."""
    order_IU = np.argsort(np.where(among_IU, -values_IU, np.inf), axis=1, kind="stable")
    count_I1 = (among_IU.sum(axis=1, keepdims=True) + 1) // 2
    chosen_IU = np.zeros_like(among_IU)
    np.put_along_axis(chosen_IU, order_IU, np.arange(values_IU.shape[1]) < count_I1, axis=1)
    return chosen_IU
