# SPDX-License-Identifier: Apache-2.0
"""Fills what every rank has left until a step time with attention, best value first.

A unit is one chunk of one micro-batch, or of a row of a lockstep group. Its budgets follow one
price level: all steps at least that good are taken. Ranks that share micro-batches, or wait in
every layer, form a rank group; otherwise every rank is one. The rule, for every rank group by
itself, in rounds:

1. *Rise.* The units of the rank group rise together, by as many levels as its makespan allows.
2. *Stop.* A unit stops whose next level does not fit: the longest chain of operations through it
   would end after the step.
3. *Give way.* Where the units could not rise together though each of them could alone, those stop
   that all of them together might delay.

So every round lifts or stops a unit. Without a pipeline this is greedy by slope. A filling ends
early, at levels that fit, where its effort is spent.

Shape legend: U units of a rank group, I rank groups that still rise, X candidates, J = R x M
micro-batches or rows.
"""

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.budgets.pipelines import Pipelines
from sparsebalance_megatron.plan.search_effort import SearchEffort

_STRIDES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
_MAX_OPERATIONS_AT_ONCE = 1 << 16
"""Operations of all strides that one call of the simulator tries."""
_MAX_ROUNDS = 64
"""Rounds after which units stay at the level they have reached."""
_CALLS_OF_LONGEST_THROUGH = 3
"""Calls of the simulator that take as long as one that finds the longest chains."""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Pipelines to fill up to ``limit_ms``, and what filling them may simulate."""

    pipelines: Pipelines
    effort: SearchEffort
    limit_ms: float

    def levels_JC(self) -> np.ndarray:
        """The price level of every unit once all rank groups are filled.

        A micro-batch that ranks share has its units on the first of them; those of the others stay
        0.
        """
        rising_EU = self.pipelines.rises_EU.copy()
        level_EU = np.zeros(rising_EU.shape, dtype=np.int64)
        for _ in range(_MAX_ROUNDS):
            groups_I = np.flatnonzero(rising_EU.any(axis=1))
            if not len(groups_I) or not self.effort.left:
                break
            rising_IU = rising_EU[groups_I]
            level_IU, rose_I = self._rise(groups_I, level_EU[groups_I], rising_IU)
            rising_IU = rising_IU & (level_IU < self.pipelines.levels)
            level_EU[groups_I] = level_IU
            rising_EU[groups_I] = self._go_on(groups_I, level_IU, rising_IU, rose_I)
        return level_EU.reshape(self.pipelines.shape_JC)

    def _rise(
        self, groups_I: np.ndarray, level_IU: np.ndarray, rising_IU: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Levels after the largest common stride that fits, and which rank groups rose at all, [I].

        Makespans only grow with levels, so halving finds it; where pipelines are small, one call
        that tries all strides is faster.
        """
        pipelines, strides = self.pipelines, len(_STRIDES)
        operations = 2 * level_IU.size
        self.effort.spend(operations * pipelines.operation_cost * strides.bit_length())

        def risen(stride_XI: np.ndarray) -> np.ndarray:
            strides_XIU = rising_IU * _STRIDES[stride_XI][..., None]
            return np.minimum(level_IU + strides_XIU, pipelines.levels)

        def fits(stride_XI: np.ndarray) -> np.ndarray:
            return pipelines.makespans_ms(groups_I, risen(stride_XI)) <= self.limit_ms

        low_I = np.zeros_like(groups_I)
        if operations * strides <= _MAX_OPERATIONS_AT_ONCE:
            tried_X1 = np.arange(1, strides)[:, None]
            low_I = fits(np.repeat(tried_X1, len(groups_I), axis=1)).sum(axis=0)
            return risen(low_I), low_I > 0
        high_I = np.full(len(groups_I), strides - 1)
        while (low_I < high_I).any():
            middle_I = (low_I + high_I + 1) // 2
            fits_I = fits(middle_I[None])[0]
            low_I = np.where(fits_I, middle_I, low_I)
            high_I = np.where(fits_I, high_I, middle_I - 1)
        return risen(low_I), low_I > 0

    def _go_on(
        self, groups_I: np.ndarray, level_IU: np.ndarray, rising_IU: np.ndarray, rose_I: np.ndarray
    ) -> np.ndarray:
        """Mask of the rising units that rise in the next round as well, [I, U]."""
        pipelines = self.pipelines
        operations = 2 * level_IU.size * pipelines.operation_cost
        self.effort.spend(operations * _CALLS_OF_LONGEST_THROUGH)
        through_IU = pipelines.longest_through_ms(groups_I, level_IU)
        added_IU = pipelines.next_level_ms(groups_I, level_IU, rising_IU)
        fits_IU = through_IU + added_IU <= self.limit_ms
        together_I1 = np.where(rising_IU, added_IU, 0.0).sum(axis=1, keepdims=True)
        stuck_I = ~rose_I & (fits_IU | ~rising_IU).all(axis=1)
        in_the_way_IU = stuck_I[:, None] & (through_IU + together_I1 > self.limit_ms)
        return rising_IU & fits_IU & ~in_the_way_IU
