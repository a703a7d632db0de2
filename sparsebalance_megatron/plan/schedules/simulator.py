# SPDX-License-Identifier: Apache-2.0
"""Event simulator of pipelines: makespan, bubbles, critical path.

An operation starts when its stage has finished the operation before it and its inputs have arrived.
The order and the inputs are those of a :data:`.orders.Schedule`, by default Megatron-Core's.
Ranks that share a slot begin each of its operations together.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches, X independent
pipelines (ranks or candidates), O operations; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.schedules.orders import Schedule, megatron_order
from sparsebalance_megatron.plan.schedules.pipeline_graph import PipelineGraph, graph_of
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
    graph = graph_of(schedule, times_2XPVM)
    if widths_XM is None:
        return graph.finish_OX(graph.durations_OX(times_2XPVM))[:-1].max(axis=0)
    members = graph.members(widths_XM)
    durations_OX = graph.durations_OX(times_2XPVM[:, members.order])
    makespans_X = np.empty(len(widths_XM))
    makespans_X[members.order] = graph.finish_OX(durations_OX, members)[:-1].max(axis=0)
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
    graph = graph_of(schedule, times_2XPVM)
    members = None if widths_XM is None else graph.members(widths_XM)
    if members is not None:
        times_2XPVM = times_2XPVM[:, members.order]
    tail = graph.durations_OX(times_2XPVM)
    finish = graph.finish_OX(tail.copy(), members)[:-1]
    rest = np.zeros_like(finish)
    for start, stop in reversed(list(graph.waves)):
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
    _check_times(times_2PVM)
    graph = graph_of(schedule, times_2PVM[:, None])
    start_O, end_O = _start_and_end(graph, times_2PVM)
    makespan_ms = float(end_O[:-1].max())
    busy_ms = _work_XPVM(times_2PVM[:, None])[0].sum(axis=(1, 2))

    def event(number: int) -> Event:
        return _event(graph, number, start_O[number], end_O[number])

    return PipelineTrace(
        makespan_ms=makespan_ms,
        events=tuple(event(number) for number in np.concatenate(graph.by_stage).tolist()),
        busy_ms=tuple(busy_ms.tolist()),
        bubble_ms=tuple((makespan_ms - busy_ms).tolist()),
        critical_path=tuple(event(number) for number in _critical(graph, start_O, end_O)),
    )


def longest_chain(times_2PVM: np.ndarray, schedule: Schedule = megatron_order) -> np.ndarray:
    """Which operations of one pipeline its critical path consists of, bool [2, P, V, M].

    That of :func:`simulate`, without all that comes with it. Trusts its input to be finite.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """
    graph = graph_of(schedule, times_2PVM[:, None])
    start_O, end_O = _start_and_end(graph, times_2PVM)
    on_path = np.zeros(times_2PVM.size, dtype=bool)
    on_path[graph.source_O[_critical(graph, start_O, end_O)]] = True
    return on_path.reshape(times_2PVM.shape)


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
    graph = graph_of(schedule, times_2RPVM)
    members = graph.members(widths_RM)
    durations_OX = graph.durations_OX(times_2RPVM[:, members.order])
    end_OX = graph.finish_OX(durations_OX.copy(), members)
    start_OX = end_OX - durations_OX
    column_R = np.argsort(members.order)
    return tuple(
        tuple(
            _event(graph, number, start_OX[number, column], end_OX[number, column])
            for number in np.concatenate(graph.by_stage).tolist()
        )
        for column in column_R.tolist()
    )


def _check_times(times: np.ndarray) -> None:
    if not np.isfinite(times).all() or times.min(initial=0.0) < 0:
        raise PlanError("a time of the pipeline is negative or not finite")


def _event(graph: PipelineGraph, number: int, start_ms: float, end_ms: float) -> Event:
    stage, operation = graph.operations[number]
    return Event(
        stage=stage,
        direction=operation.direction,
        chunk=operation.chunk,
        micro_batch=operation.micro_batch,
        start_ms=float(start_ms),
        end_ms=float(end_ms),
    )


def _work_XPVM(times_2XPVM: np.ndarray) -> np.ndarray:
    return times_2XPVM[0] + times_2XPVM[1]


def _start_and_end(graph: PipelineGraph, times_2PVM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every operation of one pipeline; ends have one entry more, the step's start, for none."""
    end_O = graph.finish_OX(graph.durations_OX(times_2PVM[:, None]))[:, 0]
    start_O = np.max([end_O[waited_O] for waited_O in (graph.before_O, *graph.inputs)], axis=0)
    return start_O, end_O


def _critical(graph: PipelineGraph, start_O: np.ndarray, end_O: np.ndarray) -> list[int]:
    number = int(end_O[:-1].argmax())
    path = []
    while number != len(graph.operations):
        path.append(number)
        waited_for = [int(waited_O[number]) for waited_O in (graph.before_O, *graph.inputs)]
        number = next(other for other in waited_for if end_O[other] >= start_O[number])
    return path[::-1]
