# SPDX-License-Identifier: Apache-2.0
"""Event simulator of pipelines: makespan, bubbles, critical path.

An operation starts when its stage has finished the operation before it and its inputs have arrived.
The order and the inputs are those of a :data:`.orders.Schedule`, by default Megatron-Core's.
Ranks that share a slot begin each of its operations together.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches, X independent
pipelines (ranks or candidates), O operations; a leading 2: forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.context_groups import Members
from sparsebalance_megatron.plan.schedules.orders import (
    PipelineOrder,
    Schedule,
    StageOperation,
    megatron_order,
)
from sparsebalance_megatron.plan.step_plan import PlanError


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation on one stage, with its times in ms."""

    stage: int
    direction: Direction
    chunk: int
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class PipelineTrace:
    """Everything that happens on one pipeline in one step.

    ``events``: by stage, in the order they run. ``busy_ms``, ``bubble_ms``: one per stage, adding
    up to the makespan. ``critical_path``: events, each of which delays the next, from a start at
    0 ms to the end.
    """

    makespan_ms: float
    events: tuple[Event, ...]
    busy_ms: tuple[float, ...]
    bubble_ms: tuple[float, ...]
    critical_path: tuple[Event, ...]


def makespans_ms(
    times_2XPVM: np.ndarray,
    schedule: Schedule = megatron_order,
    widths_XM: np.ndarray | None = None,
) -> np.ndarray:
    """Makespan of X pipelines at once, [X] ms. Trusts its input to be finite.

    Args:
        times_2XPVM: equal on all ranks that share a slot.
        schedule: order and inputs of the operations.
        widths_XM: of the slot that each pipeline takes part in (:mod:`..context_groups`); None
            where the pipelines are independent.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """
    if times_2XPVM.shape[2] == 1 and widths_XM is None:
        return _work_XPVM(times_2XPVM).sum(axis=(1, 2, 3))
    graph = _graph(schedule, *_sizes(times_2XPVM))
    if widths_XM is None:
        return _finish_OX(graph, _durations_OX(graph, times_2XPVM))[:-1].max(axis=0)
    members = _members(graph, widths_XM)
    durations_OX = _durations_OX(graph, times_2XPVM[:, members.order])
    makespans_X = np.empty(len(widths_XM))
    makespans_X[members.order] = _finish_OX(graph, durations_OX, members)[:-1].max(axis=0)
    return makespans_X


def longest_through_ms(
    times_2XPVM: np.ndarray,
    schedule: Schedule = megatron_order,
    widths_XM: np.ndarray | None = None,
) -> np.ndarray:
    """Longest chain through the forward or the backward of each (chunk, micro-batch), [X, P, V, M].

    The makespan less this is by how much both together may grow without delaying the step: a chain
    that uses either of them, or both, is no longer than this. A slot that ranks share is one.
    """
    shape = times_2XPVM.shape[1:]
    if shape[1] == 1 and widths_XM is None:
        total_X = _work_XPVM(times_2XPVM).sum(axis=(1, 2, 3))
        return np.broadcast_to(total_X[:, None, None, None], shape)
    graph = _graph(schedule, *_sizes(times_2XPVM))
    members = None if widths_XM is None else _members(graph, widths_XM)
    if members is not None:
        times_2XPVM = times_2XPVM[:, members.order]
    tail = _durations_OX(graph, times_2XPVM)
    finish = _finish_OX(graph, tail.copy(), members)[:-1]
    rest = np.zeros_like(finish)
    for start, stop in reversed(list(itertools.pairwise(graph.waves))):
        after = tail.take(graph.after_O[start:stop], axis=0)
        for output_O in graph.outputs:
            np.maximum(after, tail.take(output_O[start:stop], axis=0), out=after)
        if members is not None:
            members.maximum(after, slice(start, stop))
        rest[start:stop] = after
        tail[start:stop] += after
    through = np.empty_like(finish)
    through[graph.source_O] = finish + rest
    per_direction = len(through) // 2
    both_XPVM = np.maximum(through[:per_direction], through[per_direction:]).T.reshape(shape)
    if members is None:
        return both_XPVM
    through_XPVM = np.empty(shape)
    through_XPVM[members.order] = both_XPVM
    return through_XPVM


def simulate(times_2PVM: np.ndarray, schedule: Schedule = megatron_order) -> PipelineTrace:
    """Run one pipeline, with all its events. Times in ms.

    Raises:
        PlanError: a time is negative or not finite, or the schedule does not exist for these
            numbers.
    """
    times_2PVM = np.asarray(times_2PVM, dtype=np.float64)
    if times_2PVM.ndim != 4 or len(times_2PVM) != 2:
        raise PlanError(
            f"times have shape {times_2PVM.shape}, expected [2, stages, chunks, micro-batches]"
        )
    times_2XPVM = times_2PVM[:, None]
    _check_times(times_2XPVM)
    graph = _graph(schedule, *_sizes(times_2XPVM))
    end_O = _finish_OX(graph, _durations_OX(graph, times_2XPVM))[:, 0]
    start_O = np.max([end_O[waited_O] for waited_O in (graph.before_O, *graph.inputs)], axis=0)
    makespan_ms = float(end_O[:-1].max())
    busy_ms = _work_XPVM(times_2XPVM)[0].sum(axis=(1, 2))

    def event(number: int) -> Event:
        return _event(graph, number, start_O[number], end_O[number])

    return PipelineTrace(
        makespan_ms=makespan_ms,
        events=tuple(event(number) for number in np.concatenate(graph.by_stage).tolist()),
        busy_ms=tuple(busy_ms.tolist()),
        bubble_ms=tuple((makespan_ms - busy_ms).tolist()),
        critical_path=tuple(event(number) for number in _critical(graph, start_O, end_O)),
    )


def simulate_together(
    times_2RPVM: np.ndarray, widths_RM: np.ndarray, schedule: Schedule = megatron_order
) -> tuple[tuple[Event, ...], ...]:
    """All events of every rank, where the ranks that share a slot begin its operations together.

    Args:
        times_2RPVM: on every rank by itself; an operation ends on each when it has taken so long.
        widths_RM: of the slot that each rank takes part in.

    Raises:
        PlanError: as :func:`simulate`.
    """
    _check_times(times_2RPVM)
    graph = _graph(schedule, *_sizes(times_2RPVM))
    members = _members(graph, widths_RM)
    durations_OX = _durations_OX(graph, times_2RPVM[:, members.order])
    end_OX = _finish_OX(graph, durations_OX.copy(), members)
    start_OX = end_OX - durations_OX
    column_R = np.argsort(members.order)
    return tuple(
        tuple(
            _event(graph, number, start_OX[number, column], end_OX[number, column])
            for number in np.concatenate(graph.by_stage).tolist()
        )
        for column in column_R.tolist()
    )


def _check_times(times_2XPVM: np.ndarray) -> None:
    if not np.isfinite(times_2XPVM).all() or times_2XPVM.min(initial=0.0) < 0:
        raise PlanError("a time of the pipeline is negative or not finite")


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """Operations numbered so that wave w is the slice ``waves[w] : waves[w + 1]``.

    ``source_O`` indexes flat times [2, P, V, M]. ``before_O`` is the previous operation on the same
    stage and ``after_O`` the next; every array of ``inputs`` holds one operation that each waits
    for, and of ``outputs`` one that waits for it. The number of operations stands for none.
    """

    source_O: np.ndarray
    before_O: np.ndarray
    after_O: np.ndarray
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    waves: tuple[int, ...]
    by_stage: tuple[np.ndarray, ...]
    operations: tuple[StageOperation, ...]


def _event(graph: _Graph, number: int, start_ms: float, end_ms: float) -> Event:
    stage, operation = graph.operations[number]
    return Event(
        stage=stage,
        direction=operation.direction,
        chunk=operation.chunk,
        micro_batch=operation.micro_batch,
        start_ms=float(start_ms),
        end_ms=float(end_ms),
    )


@lru_cache(maxsize=32)
def _graph(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> _Graph:
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
    return _Graph(
        source_O=np.ravel_multi_index(tuple(place_4O), sizes),
        before_O=before_O,
        after_O=after_O[:-1],
        inputs=_columns(inputs),
        outputs=_columns(outputs),
        waves=tuple(np.searchsorted(wave_numbers, range(wave_numbers[-1] + 2)).tolist()),
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


def _sizes(times_2XPVM: np.ndarray) -> tuple[int, int, int]:
    _, _, stages, chunks, micro_batches = times_2XPVM.shape
    return stages, chunks, micro_batches


def _work_XPVM(times_2XPVM: np.ndarray) -> np.ndarray:
    return times_2XPVM[0] + times_2XPVM[1]


def _durations_OX(graph: _Graph, times_2XPVM: np.ndarray) -> np.ndarray:
    """Every operation's time, [O + 1, X]; the last row is zero, for none."""
    pipelines = times_2XPVM.shape[1]
    times = np.empty((2, len(graph.source_O) // 2, pipelines))
    for to, times_XPVM in zip(times, times_2XPVM, strict=True):
        to[:] = times_XPVM.reshape(pipelines, -1).T
    durations = np.zeros((len(graph.source_O) + 1, pipelines))
    times.reshape(-1, pipelines).take(graph.source_O, axis=0, out=durations[:-1], mode="clip")
    return durations


def _members(graph: _Graph, widths_XM: np.ndarray) -> Members:
    """Who shares each operation."""
    return Members(widths_XM.T[graph.source_O % widths_XM.shape[1]])


def _finish_OX(graph: _Graph, finish_OX: np.ndarray, members: Members | None = None) -> np.ndarray:
    """End of every operation, in the place of its duration; the last row is the step's start."""
    for start, stop in itertools.pairwise(graph.waves):
        ready = finish_OX.take(graph.before_O[start:stop], axis=0)
        for input_O in graph.inputs:
            np.maximum(ready, finish_OX.take(input_O[start:stop], axis=0), out=ready)
        if members is not None:
            members.maximum(ready, slice(start, stop))
        finish_OX[start:stop] += ready
    return finish_OX


def _critical(graph: _Graph, start_O: np.ndarray, end_O: np.ndarray) -> list[int]:
    number = int(end_O[:-1].argmax())
    path = []
    while number != len(graph.operations):
        path.append(number)
        waited_for = [int(waited_O[number]) for waited_O in (graph.before_O, *graph.inputs)]
        number = next(other for other in waited_for if end_O[other] >= start_O[number])
    return path[::-1]
