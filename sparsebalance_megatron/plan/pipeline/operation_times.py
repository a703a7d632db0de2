# SPDX-License-Identifier: Apache-2.0
"""A schedule's operations as arrays, and the times of a step as one vector over them for each rank.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches,
R data-parallel ranks or candidate pipelines, X columns of R in :attr:`.Members.order`,
O operations; a leading 2: forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.context_groups import Members
from sparsebalance_megatron.plan.pipeline.orders import (
    PipelineOrder,
    Schedule,
    StageOperation,
    megatron_order,
)
from sparsebalance_megatron.plan.plan_error import PlanError


@dataclass(frozen=True, kw_only=True)
class PipelineGraph:
    """The operations of all stages, numbered by direction, stage, chunk, micro-batch, segment.

    ``operations`` and ``micro_batch_O`` follow these numbers.

    The simulator runs operation ``run_O[i]`` as its i-th. Wave w is the slice
    ``wave_edges[w] : wave_edges[w + 1]`` of that order, in which all other arrays are:
    ``before_O`` is the previous operation on the same stage and ``after_O`` the next; every array
    of ``inputs`` holds one operation that each waits for, and of ``outputs`` one that waits for it.
    The number of operations stands for none.
    """

    shape_2PVM: tuple[int, int, int, int]
    operations: tuple[StageOperation, ...]
    micro_batch_O: np.ndarray
    run_O: np.ndarray
    before_O: np.ndarray
    after_O: np.ndarray
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    wave_edges: tuple[int, ...]
    by_stage: tuple[np.ndarray, ...]

    @property
    def waves(self) -> Iterator[tuple[int, int]]:
        """First operation of each wave, and the one after its last."""
        return itertools.pairwise(self.wave_edges)

    def durations_OX(self, ms_OX: np.ndarray) -> np.ndarray:
        """Every operation's time as they run, [O + 1, X]; the last row is zero, for none."""
        durations = np.zeros((len(self.run_O) + 1, ms_OX.shape[1]))
        ms_OX.take(self.run_O, axis=0, out=durations[:-1], mode="clip")
        return durations

    def finish_OX(self, finish_OX: np.ndarray, members: Members) -> np.ndarray:
        """End of every operation, in the place of its duration; the last row is the step's start.

        Args:
            members: with whom ``finish_OX`` has its columns in :attr:`.Members.order`.
        """
        for wave, before, inputs in self._waited_for:
            ready = finish_OX.take(before, axis=0)
            for waited in inputs:
                np.maximum(ready, finish_OX.take(waited, axis=0), out=ready)
            if members.share:
                members.maximum(ready, wave)
            finish_OX[wave] += ready
        return finish_OX

    @cached_property
    def _waited_for(self) -> list[tuple[slice, np.ndarray, list[np.ndarray]]]:
        """The slice of every wave, with what it waits for."""
        waves = itertools.starmap(slice, self.waves)
        return [
            (wave, self.before_O[wave], [input_O[wave] for input_O in self.inputs])
            for wave in waves
        ]

    def start_OX(self, finish_OX: np.ndarray, members: Members) -> np.ndarray:
        """When operations begin: their inputs have ended, on all ranks that share them."""
        waited_for = np.stack([self.before_O, *self.inputs])
        ready_OX = finish_OX[waited_for].max(axis=0)
        members.maximum(ready_OX)
        return np.asarray(ready_OX)


@lru_cache(maxsize=32)
def graph_of(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> PipelineGraph:
    """The graph of a schedule for these numbers.

    Raises:
        PlanError: the schedule does not exist for them, deadlocks, or leaves out a forward or a
            backward of a micro-batch.
    """
    order = schedule(stages, micro_batches, chunks)
    before = {
        (stage, following): (stage, previous)
        for stage, operations in enumerate(order.by_stage)
        for previous, following in itertools.pairwise(operations)
    }
    wave_of = _waves(order)
    running = sorted(wave_of, key=wave_of.__getitem__)
    numbered = sorted(wave_of, key=_place)
    number = {node: index for index, node in enumerate(numbered)}
    shape = (2, stages, chunks, micro_batches)
    whole = {_place(node)[:-1] for node in numbered}
    if len(whole) != math.prod(shape):
        raise PlanError(
            f"schedule has {len(whole)} forwards and backwards of micro-batches, "
            f"times are of {math.prod(shape)}"
        )
    runs_as = {node: index for index, node in enumerate(running)}
    inputs = [[runs_as[node] for node in order.inputs[node]] for node in running]
    outputs: list[list[int]] = [[] for _ in running]
    for index, waited_for in enumerate(inputs):
        for source in waited_for:
            outputs[source].append(index)
    none = len(running)
    before_O = np.array([runs_as[before[node]] if node in before else none for node in running])
    after_O = np.full(none + 1, none)
    after_O[before_O] = np.arange(none)
    wave_numbers = np.array([wave_of[node] for node in running])
    return PipelineGraph(
        shape_2PVM=shape,
        operations=tuple(numbered),
        micro_batch_O=np.array([operation.micro_batch for _, operation in numbered]),
        run_O=np.array([number[node] for node in running]),
        before_O=before_O,
        after_O=after_O[:-1],
        inputs=_columns(inputs),
        outputs=_columns(outputs),
        wave_edges=tuple(np.searchsorted(wave_numbers, range(wave_numbers[-1] + 2)).tolist()),
        by_stage=tuple(
            np.array([runs_as[stage, operation] for operation in operations])
            for stage, operations in enumerate(order.by_stage)
        ),
    )


def _place(node: StageOperation) -> tuple[int, int, int, int, int]:
    stage, of = node
    backward = int(of.direction is Direction.BACKWARD)
    return backward, stage, of.chunk, of.micro_batch, of.segment


def _columns(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Rows of unequal length as arrays over the rows; the number of rows where one has no more."""
    longest = max(map(len, rows))
    padded = [[*row, *[len(rows)] * (longest - len(row))] for row in rows]
    return tuple(np.array(padded).T)


def _waves(order: PipelineOrder) -> dict[StageOperation, int]:
    """Length of the longest chain of operations that ends just before each operation."""
    wave: dict[StageOperation, int] = {}
    position = [0] * len(order.by_stage)
    total = sum(map(len, order.by_stage))
    while len(wave) < total:
        known = len(wave)
        for stage, operations in enumerate(order.by_stage):
            while position[stage] < len(operations):
                node = (stage, operations[position[stage]])
                waited_for = list(order.inputs[node])
                if position[stage]:
                    waited_for.append((stage, operations[position[stage] - 1]))
                if any(source not in wave for source in waited_for):
                    break
                wave[node] = max((wave[source] + 1 for source in waited_for), default=0)
                position[stage] += 1
        if len(wave) == known:
            raise PlanError("schedule deadlocks: no stage can run its next operation")
    return wave


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Ms of every operation of a schedule on every rank.

    ``ms_OR``: equal on all ranks that share a micro-batch. ``cp_sizes_RM``: how many neighbouring
    ranks share the micro-batch of each rank and position; 1 where a rank runs it alone.

    >>> times = OperationTimes.of_micro_batches(np.ones((2, 1, 2, 1, 3)), np.ones((1, 3), int))
    >>> times.ms_OR.shape, times.by_micro_batch_2RPVM.shape
    ((12, 1), (2, 1, 2, 1, 3))
    """

    graph: PipelineGraph
    ms_OR: np.ndarray
    cp_sizes_RM: np.ndarray

    @classmethod
    def of_micro_batches(
        cls,
        times_2RPVM: np.ndarray,
        cp_sizes_RM: np.ndarray,
        schedule: Schedule = megatron_order,
    ) -> OperationTimes:
        """Times of micro-batches that pass the pipeline in one piece.

        Raises:
            PlanError: the schedule does not exist for their shape.
        """
        _, ranks, stages, chunks, micro_batches = times_2RPVM.shape
        graph = graph_of(schedule, stages, chunks, micro_batches)
        flat_OR = times_2RPVM.transpose(0, 2, 3, 4, 1).reshape(-1, ranks)
        return cls(graph=graph, ms_OR=np.ascontiguousarray(flat_OR), cp_sizes_RM=cp_sizes_RM)

    @cached_property
    def members(self) -> Members:
        """Which ranks share each operation, in the order in which the simulator runs them."""
        if self.cp_sizes_RM.max(initial=1) == 1:
            return Members(self.cp_sizes_RM.T)
        return Members(self.cp_sizes_RM.T[self.graph.micro_batch_O[self.graph.run_O]])

    @cached_property
    def by_micro_batch_2RPVM(self) -> np.ndarray:
        """[2, R, P, V, M] ms of every micro-batch that passes in one piece; read-only."""
        ms_2PVMR = self.ms_OR.reshape(*self.graph.shape_2PVM, -1)
        ms_2RMPV = np.ascontiguousarray(ms_2PVMR.transpose(0, 4, 3, 1, 2))
        ms_2RMPV.flags.writeable = False
        return ms_2RMPV.transpose(0, 1, 3, 4, 2)
