# SPDX-License-Identifier: Apache-2.0
"""A schedule's operations as arrays: their numbers, and waves that wait only for earlier waves.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches, X pipelines
(ranks or candidates), O operations, I forwards and backwards of whole micro-batches; a leading 2:
forward and backward.
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
from sparsebalance_megatron.plan.pipeline.orders import PipelineOrder, Schedule, StageOperation
from sparsebalance_megatron.plan.plan_error import PlanError


@dataclass(frozen=True, kw_only=True)
class PipelineGraph:
    """The operations of all stages, numbered by direction, stage, chunk, micro-batch, segment.

    ``operations``, ``backward_O``, ``stage_O``, ``chunk_O``, ``micro_batch_O`` and ``segment_O``
    follow these numbers. ``first_segment_I``: the first operation of each forward and backward of a
    micro-batch, in the order of [2, P, V, M].

    The simulator runs operation ``run_O[i]`` as its i-th. Wave w is the slice
    ``wave_edges[w] : wave_edges[w + 1]`` of that order, in which all other arrays are:
    ``before_O`` is the previous operation on the same stage and ``after_O`` the next; every array
    of ``inputs`` holds one operation that each waits for, and of ``outputs`` one that waits for it.
    The number of operations stands for none.
    """

    shape_2PVM: tuple[int, int, int, int]
    operations: tuple[StageOperation, ...]
    backward_O: np.ndarray
    stage_O: np.ndarray
    chunk_O: np.ndarray
    micro_batch_O: np.ndarray
    segment_O: np.ndarray
    first_segment_I: np.ndarray
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
    backward_O, stage_O, chunk_O, micro_batch_O, segment_O = np.array(list(map(_place, numbered))).T
    shape = (2, stages, chunks, micro_batches)
    whole_O = np.ravel_multi_index((backward_O, stage_O, chunk_O, micro_batch_O), shape)
    present_I, first_segment_I = np.unique(whole_O, return_index=True)
    if len(present_I) != math.prod(shape):
        raise PlanError(
            f"schedule has {len(present_I)} forwards and backwards of micro-batches, "
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
        backward_O=backward_O.astype(bool),
        stage_O=stage_O,
        chunk_O=chunk_O,
        micro_batch_O=micro_batch_O,
        segment_O=segment_O,
        first_segment_I=first_segment_I,
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
