# SPDX-License-Identifier: Apache-2.0
"""Pipelines that a filling raises: of micro-batches in one piece, or in segments.

Shape legend: Q price levels, E rank groups, W ranks of a rank group, U units of a rank group, I
rank groups that still rise, X candidates, Y segments of all ranks, Z = Y x P, O operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import first_places, unshared
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import (
    longest_through_ms,
    makespans_ms,
    operations_through_ms,
)
from sparsebalance_megatron.plan.search_effort import SEGMENT_COST, WAITING_COST
from sparsebalance_megatron.plan.segments import segmented_times
from sparsebalance_megatron.plan.step_costs import StepCosts

_MAX_OPERATIONS_AT_ONCE = 1 << 16
"""Operations of all strides that one call of the simulator tries."""


@dataclass(frozen=True, kw_only=True)
class PipelinesInOnePiece:
    """Pipelines whose micro-batches pass in one piece.

    ``floor_times``: of all micro-batches at level 0. ``growth_JCQ``: block pairs, or as much time
    in block pairs, that each level adds to a unit.
    """

    costs: StepCosts
    floor_times: OperationTimes
    growth_JCQ: np.ndarray

    @property
    def levels(self) -> int:
        return self.growth_JCQ.shape[2] - 1

    @property
    def shape_JC(self) -> tuple[int, int]:
        places, chunks, _ = self.growth_JCQ.shape
        return places, chunks

    @property
    def operation_cost(self) -> int:
        return WAITING_COST if self._group_ranks > 1 else 1

    @property
    def rises_EU(self) -> np.ndarray:
        return np.asarray(self._growth_EUQ[..., -1] > 0)

    def tries_all_strides(self, groups: int) -> bool:
        return 22 * groups * self._growth_EUQ.shape[1] <= _MAX_OPERATIONS_AT_ONCE

    def makespans_ms(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> np.ndarray:
        candidates, groups, units = level_XIU.shape
        times = self._times(np.tile(groups_I, candidates), level_XIU.reshape(-1, units))
        return makespans_ms(times).reshape(candidates, groups, self._group_ranks).max(axis=2)

    def longest_through_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        through_RPVM = longest_through_ms(self._times(groups_I, level_IU))
        return through_RPVM.transpose(0, 3, 1, 2).reshape(level_IU.shape)

    def next_level_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        now_IU, next_IU = (
            self._growth_at(groups_I, np.minimum(level_IU + more, self.levels)) for more in (0, 1)
        )
        return np.asarray((next_IU - now_IU) * self._unit_ms_EU[groups_I])

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

    def _times(self, groups_I: np.ndarray, level_IU: np.ndarray) -> OperationTimes:
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

    def _growth_at(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        """Block pairs of all units of rank groups at these levels, [I, U]."""
        units = level_IU.shape[1]
        # One flat index: three that broadcast take several times as long.
        first_IU = (groups_I[:, None] * units + np.arange(units)) * (self.levels + 1)
        return np.asarray(self.growth_JCQ.take(first_IU + level_IU))

    @cached_property
    def _share_EU(self) -> np.ndarray:
        """Share of a unit's pairs that each of its ranks computes."""
        share_J = self.costs.share_W[self._cp_sizes_RM].reshape(-1)
        return np.repeat(share_J, self.costs.chunks).reshape(self._growth_EUQ.shape[:2])


@dataclass(frozen=True, kw_only=True)
class PipelinesInSegments:
    """Pipelines whose micro-batches pass in segments: all operations of a unit rise together.

    Attributes:
        times: the operations of all ranks, at level 0.
        ms_Q2YP: what every segment takes on every stage with all units at one level.
        unit_YP: the unit of each of them, among those of all rank groups.
        first_Y: whether the unit's first rank runs the segment: others run it at the same time.
        groups: rank groups, of neighbouring ranks.
    """

    times: OperationTimes
    ms_Q2YP: np.ndarray
    unit_YP: np.ndarray
    first_Y: np.ndarray
    shape_JC: tuple[int, int]
    groups: int

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        where: Arrangement,
        budgets_QLS: Sequence[np.ndarray],
    ) -> PipelinesInSegments:
        """Pipelines of an arrangement in segments.

        Args:
            budgets_QLS: budgets with all units at one level.
        """
        job, cp_sizes_RM = costs.job, where.cp_sizes_RM
        ms_Q2YP = np.stack(
            [segmented_times(costs, where, budgets_LS)[2] for budgets_LS in budgets_QLS]
        )
        segments_RM = [list(map(len, of_rank)) for of_rank in where.segment_starts_blocks]
        rank_J, position_J = np.divmod(np.arange(cp_sizes_RM.size), cp_sizes_RM.shape[1])
        if job.lockstep_ranks > 1:
            group_ranks = job.lockstep_ranks
            unit_J = rank_J // group_ranks * job.micro_batches + position_J
            first_J = rank_J % group_ranks == 0
            rows = cp_sizes_RM.size // group_ranks
        else:
            group_ranks, rows = int(cp_sizes_RM.max()), cp_sizes_RM.size
            unit_J = first_places(cp_sizes_RM)
            first_J = unit_J == np.arange(rows)
        segments_J = np.concatenate(segments_RM)
        unit_Y1 = np.repeat(unit_J, segments_J)[:, None]
        return cls(
            times=OperationTimes.of_segments(segments_RM, ms_Q2YP[0], cp_sizes_RM),
            ms_Q2YP=ms_Q2YP,
            unit_YP=unit_Y1 * costs.chunks + np.arange(costs.chunks),
            first_Y=np.repeat(first_J, segments_J),
            shape_JC=(rows, costs.chunks),
            groups=job.data_parallel_size // group_ranks,
        )

    @property
    def levels(self) -> int:
        return len(self.ms_Q2YP) - 1

    @property
    def operation_cost(self) -> int:
        return SEGMENT_COST

    @cached_property
    def rises_EU(self) -> np.ndarray:
        return np.asarray(self._unit_ms_EUQ[..., -1] > self._unit_ms_EUQ[..., 0])

    def tries_all_strides(self, groups: int) -> bool:
        return True

    def makespans_ms(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> np.ndarray:
        ends_RX = makespans_ms(self._times(groups_I, level_XIU)).reshape(-1, len(level_XIU))
        return ends_RX.reshape(self.groups, -1, len(level_XIU)).max(axis=1)[groups_I].T

    def longest_through_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        through_2PY = operations_through_ms(self._times(groups_I, level_IU[None])).reshape(
            2, self.unit_YP.shape[1], -1
        )
        through_EU = np.zeros(self.rises_EU.size)
        np.maximum.at(through_EU, self.unit_YP, through_2PY.max(axis=0).T)
        return through_EU.reshape(self.rises_EU.shape)[groups_I]

    def next_level_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        now_IU, next_IU = (
            np.take_along_axis(
                self._unit_ms_EUQ[groups_I],
                np.minimum(level_IU + more, self.levels)[..., None],
                axis=2,
            )[..., 0]
            for more in (0, 1)
        )
        return np.asarray(next_IU - now_IU)

    @cached_property
    def _unit_ms_EUQ(self) -> np.ndarray:
        """Forward and backward ms of all segments of a unit at every level."""
        unit_ms_UQ = np.zeros((np.prod(self.shape_JC), len(self.ms_Q2YP)))
        ms_YPQ = self.ms_Q2YP.sum(axis=1).transpose(1, 2, 0)
        np.add.at(unit_ms_UQ, self.unit_YP[self.first_Y], ms_YPQ[self.first_Y])
        return unit_ms_UQ.reshape(self.groups, -1, len(self.ms_Q2YP))

    def _times(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> OperationTimes:
        """Times of all ranks, a column for each candidate; rank groups that rise no longer are not
        looked at."""
        level_XEU = np.zeros((len(level_XIU), *self.rises_EU.shape), dtype=np.int64)
        level_XEU[:, groups_I] = level_XIU
        level_XYP = level_XEU.reshape(len(level_XIU), -1)[:, self.unit_YP]
        _, _, segments, stages = self.ms_Q2YP.shape
        place_YP = np.arange(segments * stages).reshape(segments, stages)
        ms_Q2Z = self.ms_Q2YP.reshape(len(self.ms_Q2YP), 2, -1)
        ms_2XYP = np.stack([ms_Q2Z[level_XYP, direction, place_YP] for direction in (0, 1)])
        ms_OX = np.ascontiguousarray(ms_2XYP.transpose(0, 3, 2, 1)).reshape(-1, len(level_XIU))
        return OperationTimes(
            graph=self.times.graph,
            ms_OR=ms_OX,
            cp_sizes_RM=unshared(len(level_XIU), self.times.cp_sizes_RM.shape[1]),
        )
