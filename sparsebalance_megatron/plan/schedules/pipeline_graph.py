# SPDX-License-Identifier: Apache-2.0
"""A schedule's operations as arrays: in waves, each of which waits only for earlier ones.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches, X pipelines
(ranks or candidates), O operations; a leading 2: forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.context_groups import Members
from sparsebalance_megatron.plan.schedules.orders import PipelineOrder, Schedule, StageOperation
from sparsebalance_megatron.plan.step_plan import PlanError


@dataclass(frozen=True, kw_only=True)
class PipelineGraph:
    """Operations numbered so that wave w is the slice ``wave_edges[w] : wave_edges[w + 1]``.

    ``source_O`` indexes flat times [2, P, V, M]. ``before_O`` is the previous operation on the same
    stage and ``after_O`` the next; every array of ``inputs`` holds one operation that each waits
    for, and of ``outputs`` one that waits for it. The number of operations stands for none.
    """

    source_O: np.ndarray
    before_O: np.ndarray
    after_O: np.ndarray
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    wave_edges: tuple[int, ...]
    by_stage: tuple[np.ndarray, ...]
    operations: tuple[StageOperation, ...]

    @property
    def waves(self) -> Iterator[tuple[int, int]]:
        """First operation of each wave, and the one after its last."""
        return itertools.pairwise(self.wave_edges)

    def durations_OX(self, times_2XPVM: np.ndarray) -> np.ndarray:
        """Every operation's time, [O + 1, X]; the last row is zero, for none."""
        pipelines = times_2XPVM.shape[1]
        times = np.empty((2, len(self.source_O) // 2, pipelines))
        for to, times_XPVM in zip(times, times_2XPVM, strict=True):
            to[:] = times_XPVM.reshape(pipelines, -1).T
        durations = np.zeros((len(self.source_O) + 1, pipelines))
        times.reshape(-1, pipelines).take(self.source_O, axis=0, out=durations[:-1], mode="clip")
        return durations

    def members(self, widths_XM: np.ndarray) -> Members:
        """Who shares each operation."""
        return Members(widths_XM.T[self.source_O % widths_XM.shape[1]])

    def finish_OX(self, finish_OX: np.ndarray, members: Members | None = None) -> np.ndarray:
        """End of every operation, in the place of its duration; the last row is the step's start.

        Args:
            members: with whom ``finish_OX`` has its columns in :attr:`.Members.order`.
        """
        for start, stop in self.waves:
            ready = finish_OX.take(self.before_O[start:stop], axis=0)
            for input_O in self.inputs:
                np.maximum(ready, finish_OX.take(input_O[start:stop], axis=0), out=ready)
            if members is not None:
                members.maximum(ready, slice(start, stop))
            finish_OX[start:stop] += ready
        return finish_OX


def graph_of(schedule: Schedule, times_2XPVM: np.ndarray) -> PipelineGraph:
    """The graph of pipelines with such times.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """
    _, _, stages, chunks, micro_batches = times_2XPVM.shape
    return _graph(schedule, stages, chunks, micro_batches)


@lru_cache(maxsize=32)
def _graph(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> PipelineGraph:
    order = schedule(stages, micro_batches, chunks)
    before = {
        (stage, following): (stage, previous)
        for stage, operations in enumerate(order.by_stage)
        for previous, following in itertools.pairwise(operations)
    }
    wave_of = _waves(order)
    nodes = sorted(wave_of, key=wave_of.__getitem__)
    number = {node: index for index, node in enumerate(nodes)}
    inputs = [[number[node] for node in order.inputs[node]] for node in nodes]
    outputs: list[list[int]] = [[] for _ in nodes]
    for index, waited_for in enumerate(inputs):
        for source in waited_for:
            outputs[source].append(index)
    before_O = np.array([number[before[node]] if node in before else len(nodes) for node in nodes])
    after_O = np.full(len(nodes) + 1, len(nodes))
    after_O[before_O] = np.arange(len(nodes))
    sizes = (2, stages, chunks, micro_batches)
    if len(nodes) != math.prod(sizes):
        raise PlanError(f"schedule has {len(nodes)} operations, times are of {math.prod(sizes)}")
    place_4O = np.array(
        [
            (of.direction is Direction.BACKWARD, stage, of.chunk, of.micro_batch)
            for stage, of in nodes
        ]
    ).T
    wave_numbers = np.array([wave_of[node] for node in nodes])
    return PipelineGraph(
        source_O=np.ravel_multi_index(tuple(place_4O), sizes),
        before_O=before_O,
        after_O=after_O[:-1],
        inputs=_columns(inputs),
        outputs=_columns(outputs),
        wave_edges=tuple(np.searchsorted(wave_numbers, range(wave_numbers[-1] + 2)).tolist()),
        by_stage=tuple(
            np.array([number[stage, operation] for operation in operations])
            for stage, operations in enumerate(order.by_stage)
        ),
        operations=tuple(nodes),
    )


def _columns(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Rows of unequal length as arrays over the rows; the number of rows where one has no more."""
    width = max(map(len, rows))
    padded = [[*row, *[len(rows)] * (width - len(row))] for row in rows]
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
