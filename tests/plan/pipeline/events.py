# SPDX-License-Identifier: Apache-2.0
"""Events of a simulated pipeline, one by one: what tests compare and draw.

Shape legend: R data-parallel ranks or candidate pipelines, O operations.
"""

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes


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


def simulate(times: OperationTimes) -> tuple[tuple[Event, ...], ...]:
    """All events of every rank, by stage, in the order they run.

    Where ranks share a micro-batch, each rank's operation ends when it has taken its own time.

    Raises:
        PlanError: a time is negative or not finite.
    """
    if not np.isfinite(times.ms_OR).all() or times.ms_OR.min(initial=0.0) < 0:
        raise PlanError("a time of the pipeline is negative or not finite")
    graph, members = times.graph, times.members
    end_OR = graph.finish_OX(graph.durations_OX(times.ms_OR), members)
    # Operations begin when their inputs have ended, on all ranks that share them.
    start_OR = end_OR[np.stack([graph.before_O, *graph.inputs])].max(axis=0)
    members.maximum(start_OR)
    runs_as = np.argsort(graph.run_O)[graph.order.on_stage_PO.reshape(-1)]
    starts, ends = (each_OR[runs_as].T.tolist() for each_OR in (start_OR, end_OR))
    running = [
        (stage, operation)
        for stage, operations in enumerate(graph.order.by_stage)
        for operation in operations
    ]
    return tuple(
        tuple(
            Event(stage=stage, **operation._asdict(), start_ms=start_ms, end_ms=end_ms)
            for (stage, operation), start_ms, end_ms in zip(running, start_O, end_O, strict=True)
        )
        for start_O, end_O in zip(starts, ends, strict=True)
    )
