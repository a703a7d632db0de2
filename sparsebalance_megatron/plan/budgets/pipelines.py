# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose units have price levels: all operations of a unit rise together.

Shape legend: Q price levels, K directions that grow alike or apart, E rank groups, U units of a
rank group, I rank groups that still rise, A units of all rank groups, X candidates, Y micro-batches
by place, or segments, of all ranks, Z columns of times, O operations.
"""

from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms, operations_through_ms


class Pipelines:
    """Pipelines of all ranks, and what their operations take at every level.

    Args:
        times: at level 0: a column for each rank, or one where micro-batches pass in segments and
            all ranks are pipelines side by side.
        growth_KYCQ: ms of every chunk's operation on every micro-batch or segment, by direction or
            of both together.
        share_2C: of the growth that each direction takes.
        floor_2YC: ms that are not in the growth.
        cp_sizes_RM: lockstep groups that share each micro-batch or row. In each of its chunks that
            is a unit, which its first group and others run at the same time.
        segments_J: of each.
        operation_cost: cost of an operation, for :class:`.SearchEffort`.

    Attributes:
        levels: the highest level.
        shape_JC: shape of the levels of all units.
        rises_EU: which units a level can raise at all.
    """

    def __init__(
        self,
        *,
        times: OperationTimes,
        growth_KYCQ: np.ndarray,
        share_2C: np.ndarray,
        floor_2YC: np.ndarray,
        cp_sizes_RM: np.ndarray,
        segments_J: np.ndarray,
        operation_cost: int,
    ) -> None:
        directions, rows, chunks, levels = growth_KYCQ.shape
        unit_J = Groups(cp_sizes_RM).first_J
        unit_Y = np.repeat(unit_J, segments_J)
        first_Y = np.repeat(unit_J == np.arange(len(unit_J)), segments_J)
        self.times, self.unit_Y, self.first_Y = times, unit_Y, first_Y
        self._growth_K = growth_KYCQ.reshape(directions, -1)
        self._share_2C, self._floor_2YC = share_2C, floor_2YC
        self.groups = len(cp_sizes_RM) // int(cp_sizes_RM.max())
        self.operation_cost = operation_cost
        self.levels, self.shape_JC = levels - 1, (len(unit_J), chunks)
        every_YC = tuple(np.ogrid[:rows, :chunks])
        rises_YC = (self.ms(*every_YC, 0) < self.ms(*every_YC, self.levels)).any(axis=0)
        rises_JC = np.zeros(self.shape_JC, dtype=bool)
        np.logical_or.at(rises_JC, unit_Y[first_Y], rises_YC[first_Y])
        self.rises_EU = rises_JC.reshape(self.groups, -1)
        self._side_by_side = times.graph.last_PR.shape[1] > 1
        # Of every operation of one direction: its unit, and where its times begin in the table.
        unit_YC = unit_Y[:, None] * chunks + np.arange(chunks)
        place_YC = np.arange(rows * chunks).reshape(rows, chunks) * levels
        self._unit_CYZ, self._place_CYZ, *floor_2CYZ = (
            np.ascontiguousarray(of_YC.reshape(times.ms_OR.shape[1], -1, chunks).transpose(2, 1, 0))
            for of_YC in (unit_YC, place_YC, *np.broadcast_to(floor_2YC, (2, rows, chunks)))
        )
        self._floor_2CYZ = np.stack(floor_2CYZ)

    def ms(self, y: np.ndarray, c: np.ndarray, level: np.ndarray | int) -> np.ndarray:
        """Forward and backward ms [2, ...] of chunks' operations on micro-batches or segments."""
        place = (y * self.shape_JC[1] + c) * (self.levels + 1) + level
        growth_K = self._growth_K.take(place, axis=1)
        return np.asarray(growth_K * self._share_2C[:, c] + self._floor_2YC[:, y, c])

    def makespans_ms(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> np.ndarray:
        """[X, I] ms until each rank group ends with its units at each candidate's levels."""
        candidates, pipelines = len(level_XIU), self.times.graph.last_PR.shape[1]
        ends = makespans_ms(self._times(groups_I, level_XIU)).reshape(pipelines, candidates, -1)
        ranks = max(ends.shape[0] // self.groups, ends.shape[2] // len(groups_I))
        ends_XI = ends.swapaxes(0, 1).reshape(candidates, -1, ranks).max(axis=2)
        return ends_XI[:, groups_I] if self._side_by_side else ends_XI

    def longest_through_ms(self, groups_I: np.ndarray, level_IU: np.ndarray) -> np.ndarray:
        """[I, U] ms of the longest chain of operations through each unit."""
        through_OZ = operations_through_ms(self._times(groups_I, level_IU[None]))
        unit_CYZ = self._unit_CYZ[..., self._columns_Z(groups_I)]
        through_CYZ = through_OZ.reshape(2, *unit_CYZ.shape).max(axis=0)
        through_A = np.zeros(self.rises_EU.size)
        np.maximum.at(through_A, unit_CYZ.ravel(), through_CYZ.ravel())
        return through_A.reshape(self.groups, -1)[groups_I]

    def next_level_ms(
        self, groups_I: np.ndarray, level_IU: np.ndarray, rising_IU: np.ndarray
    ) -> np.ndarray:
        """[I, U] forward and backward ms that one more level adds to the rising units, on their
        first ranks; 0 for others."""
        level_EU = np.full(self.rises_EU.shape, -1)
        level_EU[groups_I] = np.where(rising_IU, level_IU, -1)
        level_YC = np.where(self.first_Y[:, None], level_EU.reshape(self.shape_JC)[self.unit_Y], -1)
        y, c = np.nonzero(level_YC >= 0)
        added_2 = self.ms(y, c, level_YC[y, c] + 1) - self.ms(y, c, level_YC[y, c])
        added_JC = np.zeros(self.shape_JC)
        np.add.at(added_JC, (self.unit_Y[y], c), added_2.sum(axis=0))
        return added_JC.reshape(self.groups, -1)[groups_I]

    def _columns_Z(self, groups_I: np.ndarray) -> np.ndarray:
        """Columns of the times in which rank groups are simulated."""
        if self._side_by_side:
            return np.zeros(1, dtype=np.int64)
        ranks = self.times.ms_OR.shape[1] // self.groups
        return (groups_I[:, None] * ranks + np.arange(ranks)).ravel()

    def _times(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> OperationTimes:
        """Times of rank groups with their units at these levels, candidate by candidate."""
        level_XEU = np.zeros((len(level_XIU), *self.rises_EU.shape), dtype=np.int64)
        level_XEU[:, groups_I] = level_XIU
        columns_Z = self._columns_Z(groups_I)
        unit_CYZ, place_CYZ = self._unit_CYZ[..., columns_Z], self._place_CYZ[..., columns_Z]
        level_XCYZ = level_XEU.reshape(len(level_XIU), -1).take(unit_CYZ, axis=1)
        at_CYXZ = np.moveaxis(level_XCYZ + place_CYZ, 0, 2)
        growth_KCYXZ = self._growth_K.take(at_CYXZ, axis=1)
        ms_2CYXZ = growth_KCYXZ * self._share_2C[..., None, None, None]
        ms_2CYXZ += self._floor_2CYZ[..., columns_Z][..., None, :]
        return replace(
            self.times,
            ms_OR=ms_2CYXZ.reshape(-1, len(level_XIU) * len(columns_Z)),
            cp_sizes_RM=np.tile(self.times.cp_sizes_RM[columns_Z], (len(level_XIU), 1)),
        )
