# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose units have price levels: all operations of a unit rise together.

Shape legend: K directions that grow alike or apart, N rows of a table, U units of a rank group, I
rank groups that still rise, A units of all rank groups, X candidates, Y micro-batches by place, or
segments, of all ranks, Z columns of times.
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
        growth_KNCQ: ms of chunks' operations by level, by direction or of both together.
        row_Y: the row of the growth of each micro-batch or segment.
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
        growth_KNCQ: np.ndarray,
        row_Y: np.ndarray,
        share_2C: np.ndarray,
        floor_2YC: np.ndarray,
        cp_sizes_RM: np.ndarray,
        segments_J: np.ndarray,
        operation_cost: int,
    ) -> None:
        *_, chunks, levels = growth_KNCQ.shape
        unit_J = Groups(cp_sizes_RM).first_J
        self.unit_Y = np.repeat(unit_J, segments_J)
        self.first_Y = np.repeat(unit_J == np.arange(len(unit_J)), segments_J)
        self.times, self.operation_cost = times, operation_cost
        self.groups = len(cp_sizes_RM) // int(cp_sizes_RM.max())
        self.levels, self.shape_JC = levels - 1, (len(unit_J), chunks)
        self._growth_K = growth_KNCQ.reshape(len(growth_KNCQ), -1)
        # Of every operation of one direction: its unit, and where its times begin in the table.
        every_C = np.arange(chunks)
        unit_YC = self.unit_Y[:, None] * chunks + every_C
        self._place_YC = (row_Y[:, None] * chunks + every_C) * levels
        self._share_2C, self._floor_2YC = share_2C, floor_2YC
        columns = times.ms_OR.shape[1]
        self._unit_CYZ, self._place_CYZ, *floors_CYZ = (
            np.ascontiguousarray(of_YC.reshape(columns, -1, chunks).transpose(2, 1, 0))
            for of_YC in (unit_YC, self._place_YC, *floor_2YC)
        )
        self._floor_2CYZ = np.stack(floors_CYZ)
        self._side_by_side = times.graph.last_PR.shape[1] > 1
        y, c = np.ogrid[: len(row_Y), :chunks]
        rises_YC = (self.ms(y, c, 0) < self.ms(y, c, self.levels)).any(axis=0)
        rises_JC = np.zeros(self.shape_JC, dtype=bool)
        np.logical_or.at(rises_JC, self.unit_Y[self.first_Y], rises_YC[self.first_Y])
        self.rises_EU = rises_JC.reshape(self.groups, -1)

    def ms(self, y: np.ndarray, c: np.ndarray, level: np.ndarray | int) -> np.ndarray:
        """Forward and backward ms [2, ...] of chunks' operations on micro-batches or segments."""
        growth_K = self._growth_K.take(self._place_YC[y, c] + level, axis=1)
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
        unit_CYZ = self._in_columns(groups_I, self._unit_CYZ)
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

    def _in_columns(self, groups_I: np.ndarray, of_all: np.ndarray) -> np.ndarray:
        """What an array [..., Z] has in the columns in which rank groups are simulated."""
        if self._side_by_side or len(groups_I) == self.groups:
            return of_all
        ranks = of_all.shape[-1] // self.groups
        return of_all.take((groups_I[:, None] * ranks + np.arange(ranks)).ravel(), axis=-1)

    def _times(self, groups_I: np.ndarray, level_XIU: np.ndarray) -> OperationTimes:
        """Times of rank groups with their units at these levels, candidate by candidate."""
        candidates = len(level_XIU)
        level_XEU = np.zeros((candidates, *self.rises_EU.shape), dtype=np.int64)
        level_XEU[:, groups_I] = level_XIU
        unit_CYZ, place_CYZ, floor_2CYZ, cp_sizes_MZ = (
            self._in_columns(groups_I, of_all)
            for of_all in (
                *(self._unit_CYZ, self._place_CYZ, self._floor_2CYZ),
                self.times.cp_sizes_RM.T,
            )
        )
        at_XCYZ = level_XEU.reshape(candidates, -1).take(unit_CYZ, axis=1)
        at_XCYZ += place_CYZ
        growth_KCYXZ = self._growth_K.take(np.moveaxis(at_XCYZ, 0, 2), axis=1)
        ms_2CYXZ = growth_KCYXZ * self._share_2C[..., None, None, None]
        ms_2CYXZ += floor_2CYZ[..., None, :]
        return replace(
            self.times,
            ms_OR=ms_2CYXZ.reshape(-1, candidates * unit_CYZ.shape[-1]),
            cp_sizes_RM=np.tile(cp_sizes_MZ.T, (candidates, 1)),
        )
