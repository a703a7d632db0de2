# SPDX-License-Identifier: Apache-2.0
"""Event simulator of Megatron's pipeline schedules: makespan, bubbles, critical path.

An operation is a forward or a backward of one model chunk for one micro-batch. It starts when its
stage has finished the operation before it and its input has arrived: a forward waits for the
previous chunk's forward, a backward for the next chunk's backward, the backward of the model's
last chunk for its own forward. Sends are buffered: a stage never waits for a receiver.

Shape legend: P stages, V chunks per stage, M micro-batches, X independent pipelines (ranks or
candidates), N operations.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sparsebalance_megatron.plan.step_plan import PlanError

SCHEDULES = ("no_pipeline", "1f1b", "interleaved")
Operation = tuple[str, int, int]
"""("forward" or "backward", chunk, micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation on one stage, with its times in ms."""

    stage: int
    kind: str
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


def schedule_name(stages: int, virtual_stages: int) -> str:
    """The schedule that Megatron-Core's ``get_forward_backward_func`` picks."""
    if stages == 1:
        return "no_pipeline"
    return "interleaved" if virtual_stages > 1 else "1f1b"


def schedule_order(
    stages: int, micro_batches: int, schedule: str, virtual_stages: int, stage: int
) -> list[Operation]:
    """The operations of one stage in the order Megatron-Core runs them.

    Source: ``megatron.core.pipeline_parallel.schedules`` (``get_pp_rank_microbatches``,
    ``get_schedule_table``, with the default group size, the number of stages).

    Raises:
        PlanError: the schedule is unknown or does not exist for these numbers.
    """
    _check_schedule(stages, micro_batches, schedule, virtual_stages)
    total = micro_batches * virtual_stages
    if schedule == "no_pipeline":
        return [
            operation for m in range(micro_batches) for operation in _whole_model(m, virtual_stages)
        ]
    if schedule == "1f1b":
        warm_up = stages - stage - 1
        table = [(m, 0) for m in range(micro_batches)]
    else:
        warm_up = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages
        table = [
            (m, chunk)
            for first in range(0, micro_batches, stages)
            for chunk in range(virtual_stages)
            for m in range(first, first + stages)
        ]
    warm_up = min(warm_up, total)
    forwards = [("forward", chunk, m) for m, chunk in table]
    backwards = [("backward", virtual_stages - 1 - chunk, m) for m, chunk in table]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[total - warm_up :]


def _whole_model(micro_batch: int, virtual_stages: int) -> list[Operation]:
    chunks = range(virtual_stages)
    forwards = [("forward", chunk, micro_batch) for chunk in chunks]
    return forwards + [("backward", chunk, micro_batch) for chunk in reversed(chunks)]


def _check_schedule(stages: int, micro_batches: int, schedule: str, virtual_stages: int) -> None:
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if min(stages, micro_batches, virtual_stages) < 1:
        raise PlanError(
            f"schedule {schedule}: {stages} stages, {virtual_stages} chunks and {micro_batches} "
            "micro-batches; each must be at least 1"
        )
    if schedule == "no_pipeline" and stages != 1:
        raise PlanError(f"schedule no_pipeline has 1 stage, not {stages}; use 1f1b")
    if schedule == "1f1b" and virtual_stages != 1:
        raise PlanError(f"schedule 1f1b has 1 chunk per stage, not {virtual_stages}")
    if schedule == "interleaved" and micro_batches % stages:
        raise PlanError(
            f"schedule interleaved: {micro_batches} micro-batches are no multiple of {stages} "
            "pipeline stages; change the global batch size"
        )


@dataclass(frozen=True)
class _Graph:
    """Operations numbered so that wave w is the slice ``waves[w] : waves[w + 1]``.

    ``source_N`` indexes forward [P, V, M] followed by backward [P, V, M]. ``before_N`` is the
    previous operation on the same stage, ``input_N`` the one on another stage or chunk; ``after_N``
    and ``output_N`` are their inverses; N stands for none. ``remote_N``: the input crosses stages.
    """

    source_N: np.ndarray
    before_N: np.ndarray
    input_N: np.ndarray
    after_N: np.ndarray
    output_N: np.ndarray
    remote_N: np.ndarray
    waves: tuple[int, ...]
    by_stage: tuple[np.ndarray, ...]
    operations: tuple[tuple[int, Operation], ...]


def _input_of(
    stage: int, operation: Operation, stages: int, virtual_stages: int
) -> tuple[int, Operation] | None:
    kind, chunk, m = operation
    depth, last = chunk * stages + stage, stages * virtual_stages - 1
    if kind == "forward":
        depth -= 1
    elif depth == last:
        kind = "forward"
    else:
        depth += 1
    return None if depth < 0 else (depth % stages, (kind, depth // stages, m))


@lru_cache(maxsize=32)
def _graph(stages: int, micro_batches: int, schedule: str, virtual_stages: int) -> _Graph:
    orders = [
        schedule_order(stages, micro_batches, schedule, virtual_stages, stage)
        for stage in range(stages)
    ]
    wave_of = _waves(orders, virtual_stages)
    nodes = sorted(wave_of, key=wave_of.__getitem__)
    number = {node: index for index, node in enumerate(nodes)}
    none = len(nodes)
    before = {
        (stage, following): number[stage, previous]
        for stage, order in enumerate(orders)
        for previous, following in itertools.pairwise(order)
    }
    inputs = [_input_of(stage, operation, stages, virtual_stages) for stage, operation in nodes]
    per_kind = stages * virtual_stages * micro_batches
    source = [
        (kind == "backward") * per_kind + (stage * virtual_stages + chunk) * micro_batches + m
        for stage, (kind, chunk, m) in nodes
    ]
    wave_numbers = np.array([wave_of[node] for node in nodes])
    before_N = np.array([before.get(node, none) for node in nodes])
    input_N = np.array([none if node is None else number[node] for node in inputs])
    return _Graph(
        source_N=np.array(source),
        before_N=before_N,
        input_N=input_N,
        after_N=_inverse(before_N),
        output_N=_inverse(input_N),
        remote_N=np.array(
            [
                node is not None and node[0] != stage
                for node, (stage, _) in zip(inputs, nodes, strict=True)
            ]
        ),
        waves=tuple(np.searchsorted(wave_numbers, range(wave_numbers[-1] + 2)).tolist()),
        by_stage=tuple(
            np.array([number[stage, operation] for operation in order])
            for stage, order in enumerate(orders)
        ),
        operations=tuple(nodes),
    )


def _inverse(previous_N: np.ndarray) -> np.ndarray:
    """Every operation precedes at most one on its stage and feeds at most one; N for none."""
    following = np.full(len(previous_N) + 1, len(previous_N))
    following[previous_N] = np.arange(len(previous_N))
    return following[:-1]


def _waves(orders: list[list[Operation]], virtual_stages: int) -> dict[tuple[int, Operation], int]:
    """Length of the longest chain of operations that ends just before each operation."""
    stages = len(orders)
    wave: dict[tuple[int, Operation], int] = {}
    position = [0] * stages
    total = sum(map(len, orders))
    while len(wave) < total:
        progressed = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                operation = order[position[stage]]
                source = _input_of(stage, operation, stages, virtual_stages)
                if source is not None and source not in wave:
                    break
                after = -1 if source is None else wave[source]
                if position[stage]:
                    after = max(after, wave[stage, order[position[stage] - 1]])
                wave[stage, operation] = after + 1
                position[stage] += 1
                progressed = True
        if not progressed:
            raise PlanError("schedule deadlocks: no stage can run its next operation")
    return wave


def _durations_NX(graph: _Graph, forward_XPVM: np.ndarray, backward_XPVM: np.ndarray) -> np.ndarray:
    """Every operation's time, [N + 1, X]; the last row is zero, for none."""
    pipelines, per_kind = len(forward_XPVM), forward_XPVM[0].size
    durations = np.empty((2 * per_kind, pipelines))
    durations[:per_kind] = forward_XPVM.reshape(pipelines, -1).T
    durations[per_kind:] = backward_XPVM.reshape(pipelines, -1).T
    by_node = np.zeros((len(graph.source_N) + 1, pipelines))
    durations.take(graph.source_N, axis=0, out=by_node[:-1], mode="clip")
    return by_node


def _finish_NX(
    graph: _Graph, forward_XPVM: np.ndarray, backward_XPVM: np.ndarray, p2p_ms: float
) -> np.ndarray:
    """End of every operation, [N + 1, X]; the last row is the start of the step."""
    finish = _durations_NX(graph, forward_XPVM, backward_XPVM)
    delay = np.where(graph.remote_N, p2p_ms, 0.0)[:, None]
    for start, stop in itertools.pairwise(graph.waves):
        arrival = finish.take(graph.input_N[start:stop], axis=0)
        if p2p_ms:
            arrival += delay[start:stop]
        free = finish.take(graph.before_N[start:stop], axis=0)
        finish[start:stop] += np.maximum(arrival, free, out=arrival)
    return finish


def _chunked(array: np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(array, dtype=np.float64)
    if not np.isfinite(array).all() or (array.size and array.min() < 0):
        raise PlanError(f"{name}: a time is negative or not finite")
    return array


def makespans_ms(
    forward_XPVM: np.ndarray,
    backward_XPVM: np.ndarray,
    *,
    schedule: str = "1f1b",
    p2p_ms: float = 0.0,
) -> np.ndarray:
    """Makespan of X independent pipelines at once, [X] ms. Trusts its input to be finite."""
    _, stages, virtual_stages, micro_batches = forward_XPVM.shape
    if schedule == "no_pipeline":
        _check_schedule(stages, micro_batches, schedule, virtual_stages)
        return (forward_XPVM + backward_XPVM).sum(axis=(1, 2, 3))
    graph = _graph(stages, micro_batches, schedule, virtual_stages)
    return _finish_NX(graph, forward_XPVM, backward_XPVM, p2p_ms)[:-1].max(axis=0)


def longest_through_ms(
    forward_XPVM: np.ndarray, backward_XPVM: np.ndarray, *, schedule: str
) -> np.ndarray:
    """Longest chain through the forward or the backward of each (chunk, micro-batch), [X, P, V, M].

    The makespan less this is by how much both together may grow without delaying the step: a chain
    that uses either of them, or both, is no longer than this.
    """
    pipelines, stages, virtual_stages, micro_batches = forward_XPVM.shape
    if schedule == "no_pipeline":
        total_X = (forward_XPVM + backward_XPVM).sum(axis=(1, 2, 3))
        return np.broadcast_to(total_X[:, None, None, None], forward_XPVM.shape)
    graph = _graph(stages, micro_batches, schedule, virtual_stages)
    finish = _finish_NX(graph, forward_XPVM, backward_XPVM, 0.0)[:-1]
    tail = _durations_NX(graph, forward_XPVM, backward_XPVM)
    rest = np.zeros_like(finish)
    for start, stop in reversed(list(itertools.pairwise(graph.waves))):
        after = tail.take(graph.after_N[start:stop], axis=0)
        output = tail.take(graph.output_N[start:stop], axis=0)
        rest[start:stop] = np.maximum(after, output, out=after)
        tail[start:stop] += after
    through = np.empty_like(finish)
    through[graph.source_N] = finish + rest
    per_kind = len(through) // 2
    both = np.maximum(through[:per_kind], through[per_kind:])
    return both.T.reshape(pipelines, stages, virtual_stages, micro_batches)


def simulate(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    *,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    p2p_ms: float = 0.0,
) -> PipelineTrace:
    """Run one pipeline. Times are [P, M] or [P, V, M] ms; ``p2p_ms`` delays every crossing.

    Raises:
        PlanError: shapes differ, a time is negative or not finite, or the schedule does not exist.
    """
    forward, backward = _chunked(forward_ms, "forward_ms"), _chunked(backward_ms, "backward_ms")
    if forward.ndim == 2:
        forward, backward = forward[:, None, :], backward[:, None, :]
    if forward.shape != backward.shape or forward.shape[1] != virtual_stages:
        raise PlanError(
            f"forward_ms {forward.shape} and backward_ms {backward.shape} must both be "
            f"[stages, {virtual_stages}, micro-batches]"
        )
    stages, _, micro_batches = forward.shape
    graph = _graph(stages, micro_batches, schedule, virtual_stages)
    end_N = _finish_NX(graph, forward[None], backward[None], p2p_ms)[:, 0]
    makespan_ms = float(end_N[:-1].max())
    busy_ms = (forward + backward).sum(axis=(1, 2))
    start_N = _starts(graph, end_N, p2p_ms)
    numbers = np.concatenate(graph.by_stage)
    return PipelineTrace(
        makespan_ms=makespan_ms,
        events=tuple(_event(graph, n, start_N, end_N) for n in numbers),
        busy_ms=tuple(busy_ms.tolist()),
        bubble_ms=tuple((makespan_ms - busy_ms).tolist()),
        critical_path=tuple(
            _event(graph, n, start_N, end_N) for n in _critical(graph, start_N, end_N)
        ),
    )


def _starts(graph: _Graph, end_N: np.ndarray, p2p_ms: float) -> np.ndarray:
    arrival_N = end_N[graph.input_N] + np.where(graph.remote_N, p2p_ms, 0.0)
    return np.maximum(end_N[graph.before_N], arrival_N)


def _event(graph: _Graph, n: int, start_N: np.ndarray, end_N: np.ndarray) -> Event:
    stage, (kind, chunk, micro_batch) = graph.operations[n]
    return Event(
        stage=stage,
        kind=kind,
        chunk=chunk,
        micro_batch=micro_batch,
        start_ms=float(start_N[n]),
        end_ms=float(end_N[n]),
    )


def _critical(graph: _Graph, start_N: np.ndarray, end_N: np.ndarray) -> list[int]:
    none = len(graph.operations)
    n = int(end_N[:-1].argmax())
    path = []
    while n != none:
        path.append(n)
        before, source = int(graph.before_N[n]), int(graph.input_N[n])
        n = before if end_N[before] >= start_N[n] else source
    return path[::-1]
