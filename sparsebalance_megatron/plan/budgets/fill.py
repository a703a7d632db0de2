# SPDX-License-Identifier: Apache-2.0
"""Fills what every rank has left until a step time with attention, best value first.

A unit is one chunk of one micro-batch. Its budgets follow one price level: all steps at least that
good are taken. Ranks that share micro-batches form a rank group; without shared micro-batches every
rank is one. The rule, for every rank group by itself, in rounds:

1. *Rise.* The units of the rank group rise together, by as many levels as its makespan allows.
2. *Stop.* A unit stops whose next level does not fit: the longest chain of operations through it
   would end after the step.
3. *Give way.* Where the units could not rise together though each of them could alone, the more
   expensive half stops of those that all of them together might delay.

So every round lifts or stops a unit. Without a pipeline this is greedy by slope. A filling ends
early, at levels that fit, where its effort is spent.

Shape legend: Q price levels, S samples, L layers, Z sizes (samples of as many blocks),
R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, C = P x V chunks,
J = R x M micro-batches, E groups, W ranks of a rank group, U = W x M x C units of a rank group, I
rank groups that still rise; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.budgets.price import LEVELS
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import longest_through_ms, makespans_ms
from sparsebalance_megatron.plan.search_effort import WAITING_COST, SearchEffort
from sparsebalance_megatron.plan.step_costs import StepCosts

_STRIDES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
_MAX_ROUNDS = 64
"""Rounds after which units stay at the level they have reached."""
_MAX_OPERATIONS_AT_ONCE = 1 << 16
"""Operations of all strides that one call of the simulator tries."""
_CALLS_OF_LONGEST_THROUGH = 3
"""Calls of the simulator that take as long as one of :func:`.longest_through_ms`."""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Pipelines to fill.

    ``floor_times``: of all micro-batches at their floors. ``growth_JCQ``: of
    :func:`unit_growth_JCQ`. ``effort``: what all fillings together may simulate.
    """

    costs: StepCosts
    floor_times: OperationTimes
    growth_JCQ: np.ndarray
    effort: SearchEffort

    def levels_JC(self, limit_ms: float) -> np.ndarray:
        """The price level of every unit once all rank groups are filled up to ``limit_ms``.

        A micro-batch that ranks share has its units on the first of them; those of the others stay
        0.
        """
        level_EU = np.zeros(self._growth_EUQ.shape[:2], dtype=np.int64)
        rising_EU = self._growth_EUQ[..., -1] > 0
        for _ in range(_MAX_ROUNDS):
            groups_I = np.flatnonzero(rising_EU.any(axis=1))
            if not len(groups_I) or not self.effort.left:
                break
            rising_IU = rising_EU[groups_I]
            level_IU, rose_I = self._rise(groups_I, level_EU[groups_I], rising_IU, limit_ms)
            rising_IU = rising_IU & (level_IU < LEVELS)
            level_EU[groups_I] = level_IU
            rising_EU[groups_I] = self._go_on(groups_I, level_IU, rising_IU, rose_I, limit_ms)
        return level_EU.reshape(self.growth_JCQ.shape[:2])

    @property
    def _waiting(self) -> int:
        return WAITING_COST if self._group_ranks > 1 else 1

    @property
    def _cp_sizes_RM(self) -> np.ndarray:
        return self.floor_times.cp_sizes_RM

    @cached_property
    def _group_ranks(self) -> int:
        return int(self._cp_sizes_RM.max())

    @cached_property
    def _growth_EUQ(self) -> np.ndarray:
        groups = self.costs.job.data_parallel_size // self._group_ranks
        return self.growth_JCQ.reshape(groups, -1, self.growth_JCQ.shape[-1])

    @cached_property
    def _unit_ms_EU(self) -> np.ndarray:
        """Forward and backward ms that a block pair of each unit takes, on each of its ranks."""
        costs = self.costs
        ranks_R = np.arange(costs.job.data_parallel_size)
        pair_2RMC = np.broadcast_to(
            costs.pair_2C[:, None, None], (2, *self._cp_sizes_RM.shape, costs.chunks)
        )
        ms_2RMC = costs.on_devices(pair_2RMC, ranks_R, self._cp_sizes_RM)
        ms_RMC = (ms_2RMC[0] + ms_2RMC[1]) * costs.share_W[self._cp_sizes_RM][..., None]
        return ms_RMC.reshape(self._growth_EUQ.shape[:2])

    @cached_property
    def _first_unit_EU(self) -> np.ndarray:
        """The unit on the first rank, for every rank's part of a micro-batch."""
        chunks = self.costs.chunks
        unit_JC = first_places(self._cp_sizes_RM)[:, None] * chunks + np.arange(chunks)
        units = self._growth_EUQ.shape[1]
        return unit_JC.reshape(-1, units) % units

    def _rise(
        self, groups_I: np.ndarray, level_IU: np.ndarray, rising_IU: np.ndarray, limit_ms: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Levels after the largest common stride that fits, and which rank groups rose at all, [I].

        Makespans only grow with levels, so halving finds it; where pipelines are small, one call
        that tries all strides is faster.
        """

        def risen(stride_I: np.ndarray, part_I: np.ndarray) -> np.ndarray:
            strides_IU = rising_IU[part_I] * _STRIDES[stride_I][:, None]
            return np.minimum(level_IU[part_I] + strides_IU, LEVELS)

        def fits(stride_I: np.ndarray, part_I: np.ndarray) -> np.ndarray:
            ms_X = makespans_ms(self._pipelines(groups_I[part_I], risen(stride_I, part_I)))
            return (ms_X <= limit_ms).reshape(-1, self._group_ranks).all(axis=1)

        every_I, strides = np.arange(len(groups_I)), len(_STRIDES)
        self.effort.spend(2 * level_IU.size * self._waiting * strides.bit_length())
        if 2 * level_IU.size * strides <= _MAX_OPERATIONS_AT_ONCE:
            tried = np.arange(1, strides)
            fits_I = fits(np.tile(tried, len(every_I)), np.repeat(every_I, len(tried)))
            low_I = fits_I.reshape(-1, len(tried)).sum(axis=1)
            return risen(low_I, every_I), low_I > 0
        low_I, high_I = np.zeros_like(every_I), np.full(len(every_I), strides - 1)
        while len(open_I := np.flatnonzero(low_I < high_I)):
            middle_I = (low_I[open_I] + high_I[open_I] + 1) // 2
            fits_I = fits(middle_I, open_I)
            low_I[open_I] = np.where(fits_I, middle_I, low_I[open_I])
            high_I[open_I] = np.where(fits_I, high_I[open_I], middle_I - 1)
        return risen(low_I, every_I), low_I > 0

    def _go_on(
        self,
        groups_I: np.ndarray,
        level_IU: np.ndarray,
        rising_IU: np.ndarray,
        rose_I: np.ndarray,
        limit_ms: float,
    ) -> np.ndarray:
        """Mask of the rising units that rise in the next round as well, [I, U]."""
        self.effort.spend(2 * level_IU.size * _CALLS_OF_LONGEST_THROUGH * self._waiting)
        through_XPVM = longest_through_ms(self._pipelines(groups_I, level_IU))
        through_IU = through_XPVM.transpose(0, 3, 1, 2).reshape(level_IU.shape)
        added_IU = self._next_level_ms(groups_I, level_IU)
        fits_IU = through_IU + added_IU <= limit_ms
        together_I1 = np.where(rising_IU, added_IU, 0.0).sum(axis=1, keepdims=True)
        stuck_I = ~rose_I & (fits_IU | ~rising_IU).all(axis=1)
        in_the_way_IU = rising_IU & (through_IU + together_I1 > limit_ms) & stuck_I[:, None]
        going_IU = rising_IU & fits_IU
        ways_I = np.flatnonzero(in_the_way_IU.any(axis=1))
        going_IU[ways_I] &= ~_larger_half(added_IU[ways_I], in_the_way_IU[ways_I])
        return going_IU

    def _pipelines(self, groups_I: np.ndarray, level_IU: np.ndarray) -> OperationTimes:
        """Times of rank groups with their units at these levels: I x W pipelines."""
        pairs_IU = self._growth_at(groups_I, level_IU)
        if self._group_ranks > 1:
            pairs_IU = np.take_along_axis(pairs_IU, self._first_unit_EU[groups_I], axis=1)
            pairs_IU *= self._share_EU[groups_I]
        pairs_RMC = pairs_IU.reshape(-1, self.costs.job.micro_batches, self.costs.chunks)
        of_group_W = np.arange(self._group_ranks)
        ranks_R = (groups_I[:, None] * self._group_ranks + of_group_W).reshape(-1)
        grown_2RMC = pairs_RMC * self.costs.pair_2C[:, None, None]
        cp_sizes_RM = self._cp_sizes_RM[ranks_R]
        grown_2RMC = self.costs.on_devices(grown_2RMC, ranks_R, cp_sizes_RM)
        return self.costs.flat(self._floor_ms_2RMC[:, ranks_R] + grown_2RMC, cp_sizes_RM)

    @cached_property
    def _floor_ms_2RMC(self) -> np.ndarray:
        _, ranks, *_ = self.floor_times.by_micro_batch_2RPVM.shape
        job = self.costs.job
        floor_2RMPV = self.floor_times.by_micro_batch_2RPVM.transpose(0, 1, 4, 2, 3)
        return np.ascontiguousarray(floor_2RMPV).reshape(2, ranks, job.micro_batches, -1)

    def _next_level_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        """Forward and backward ms that one more level adds to every unit, [I, U]."""
        now_IU, next_IU = (
            self._growth_at(groups_I, np.minimum(level_IU + more, LEVELS)) for more in (0, 1)
        )
        return (next_IU - now_IU) * self._unit_ms_EU[groups_I]

    def _growth_at(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        """Block pairs of all units of rank groups at these levels, [I, U]."""
        units = level_IU.shape[1]
        # One flat index: three that broadcast take several times as long.
        first_IU = (groups_I[:, None] * units + np.arange(units)) * (LEVELS + 1)
        return np.asarray(self.growth_JCQ.take(first_IU + level_IU))

    @cached_property
    def _share_EU(self) -> np.ndarray:
        """Share of a unit's pairs that each of its ranks computes."""
        share_J = self.costs.share_W[self._cp_sizes_RM].reshape(-1)
        return np.repeat(share_J, self.costs.chunks).reshape(self._growth_EUQ.shape[:2])


def _larger_half(values_IU: np.ndarray, among_IU: np.ndarray) -> np.ndarray:
    """The larger half of each row's marked entries, rounded up."""
    order_IU = np.argsort(np.where(among_IU, -values_IU, np.inf), axis=1, kind="stable")
    count_I1 = (among_IU.sum(axis=1, keepdims=True) + 1) // 2
    chosen_IU = np.zeros_like(among_IU)
    np.put_along_axis(chosen_IU, order_IU, np.arange(values_IU.shape[1]) < count_I1, axis=1)
    return chosen_IU
