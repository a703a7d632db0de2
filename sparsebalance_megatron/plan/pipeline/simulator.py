# SPDX-License-Identifier: Apache-2.0
"""Event simulator of pipelines: when their operations begin and end, and which delay the end.

An operation starts when its stage has finished the operation before it and its inputs have arrived.
The order and the inputs are those of the :data:`.orders.Schedule` that the times are of. Ranks that
share a micro-batch begin each of its operations together.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches,
R data-parallel ranks or candidate pipelines, O operations, X columns of R in
:attr:`.Members.order`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.plan_error import PlanError


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation on one stage, with its times in ms."""

    stage: int
    direction: Direction
    chunk: int
    micro_batch: int
    segment: int = 0
    start_ms: float
    end_ms: float


def makespans_ms(times: OperationTimes) -> np.ndarray:
    """[R] ms until the last operation of each rank ends. Trusts the times to be finite."""
    graph, members = times.graph, times.members
    if len(graph.by_stage) == 1 and not members.share:
        return _work_of_one_stage_R(times)
    finish_OX = _finish_OX(times)
    return members.back_in_order(finish_OX[:-1].max(axis=0))


def longest_through_ms(times: OperationTimes) -> np.ndarray:
    """Longest chain through the forward or the backward of each (chunk, micro-batch), [R, P, V, M].

    The makespan less this is by how much both together may grow without delaying the step: a chain
    that uses either of them, or both, is no longer than this. A shared micro-batch is one.
    """
    graph, members = times.graph, times.members
    _, stages, chunks, micro_batches = graph.shape_2PVM
    if stages == 1 and not members.share:
        work_R111 = _work_of_one_stage_R(times)[:, None, None, None]
        return np.broadcast_to(work_R111, (len(work_R111), 1, chunks, micro_batches))
    tail = graph.durations_OX(members.in_order(times.ms_OR))
    finish = graph.finish_OX(tail.copy(), members)[:-1]
    rest = np.zeros_like(finish)
    for start, stop in reversed(list(graph.waves)):
        after = tail.take(graph.after_O[start:stop], axis=0)
        for output_O in graph.outputs:
            np.maximum(after, tail.take(output_O[start:stop], axis=0), out=after)
        if members.share:
            members.maximum(after, slice(start, stop))
        rest[start:stop] = after
        tail[start:stop] += after
    through = np.empty_like(finish)
    through[graph.run_O] = finish + rest
    forwards = len(through) // 2
    both_OX = np.maximum(through[:forwards], through[forwards:])
    return members.back_in_order(both_OX).T.reshape(-1, stages, chunks, micro_batches)


def simulate(times: OperationTimes) -> tuple[tuple[Event, ...], ...]:
    """All events of every rank, by stage, in the order they run.

    Where ranks share a micro-batch, each rank's operation ends when it has taken its own time.

    Raises:
        PlanError: a time is negative or not finite.
    """
    if not np.isfinite(times.ms_OR).all() or times.ms_OR.min(initial=0.0) < 0:
        raise PlanError("a time of the pipeline is negative or not finite")
    graph, members = times.graph, times.members
    end_OX = _finish_OX(times)
    start_OX = graph.start_OX(end_OX, members)
    start_OR, end_OR = members.back_in_order(start_OX), members.back_in_order(end_OX)
    running = np.concatenate(graph.by_stage).tolist()

    def event(index: int, start_ms: float, end_ms: float) -> Event:
        stage, operation = graph.operations[graph.run_O[index]]
        return Event(stage=stage, **operation._asdict(), start_ms=start_ms, end_ms=end_ms)

    return tuple(
        tuple(event(index, start_O[index], end_O[index]) for index in running)
        for start_O, end_O in zip(start_OR.T.tolist(), end_OR.T.tolist(), strict=True)
    )


def longest_chain(times: OperationTimes) -> np.ndarray:
    """The critical path of the only rank: which operations, each delaying the next, it holds, [O].

    Trusts the times to be finite.
    """
    graph = times.graph
    end_OX = _finish_OX(times)
    start_O = graph.start_OX(end_OX, times.members)[:, 0]
    end_O = end_OX[:, 0]
    on_path_O = np.zeros(len(graph.run_O), dtype=bool)
    index = int(end_O[:-1].argmax())
    while index != len(graph.run_O):
        on_path_O[graph.run_O[index]] = True
        waited_for = [int(waited_O[index]) for waited_O in (graph.before_O, *graph.inputs)]
        index = next(other for other in waited_for if end_O[other] >= start_O[index])
    return on_path_O


def _finish_OX(times: OperationTimes) -> np.ndarray:
    members = times.members
    durations_OX = times.graph.durations_OX(members.in_order(times.ms_OR))
    return times.graph.finish_OX(durations_OX, members)


def _work_of_one_stage_R(times: OperationTimes) -> np.ndarray:
    """A stage without a pipeline never waits: the step takes the sum of its operations."""
    forwards = len(times.ms_OR) // 2
    work_OR = times.ms_OR[:forwards] + times.ms_OR[forwards:]
    return np.asarray(np.ascontiguousarray(work_OR.T).sum(axis=1))
