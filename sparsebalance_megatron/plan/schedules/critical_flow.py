# SPDX-License-Identifier: Apache-2.0
"""By how much the end of a step moves when an operation takes a little longer.

A step ends with its longest chain of operations. Where many chains are nearly as long, which a
tuned plan makes them, it is no use to ask which one that is: an operation counts for as much as the
chains through it do, those shorter by less than a blur by how short they are. That is a flow of 1:
it enters at the operations that end last and parts, at each, among those that it waited for.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches,
R data-parallel ranks, O operations, I operations that each waits for; a leading 2: forward and
backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.schedules.orders import Schedule
from sparsebalance_megatron.plan.schedules.pipeline_graph import graph_of


def critical_flow(
    times_2RPVM: np.ndarray, schedule: Schedule, widths_RM: np.ndarray | None, blur_ms: float
) -> np.ndarray:
    """The part of the flow through every operation, [2, R, P, V, M].

    Where ranks share a slot, its operations begin together, and what flows through the one is the
    sum over the ranks that share it.

    Args:
        times_2RPVM: equal on all ranks that share a slot.
        widths_RM: of the slot that each rank takes part in; None where all are 1.
        blur_ms: above 0.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """

    def nearness(short_ms: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(0.0, 1.0 - short_ms / blur_ms) ** 2)

    graph = graph_of(schedule, times_2RPVM)
    members = None if widths_RM is None else graph.members(widths_RM)
    if members is not None:
        times_2RPVM = times_2RPVM[:, members.order]
    duration_OR = graph.durations_OX(times_2RPVM)
    finish_OR = graph.finish_OX(duration_OR.copy(), members)
    waited_for = (graph.before_O, *graph.inputs)
    arrival_IOR = finish_OR[np.stack(waited_for)]
    ready_OR = arrival_IOR.max(axis=0)
    part_IOR = nearness(ready_OR - arrival_IOR)
    part_IOR /= part_IOR.sum(axis=0)
    if members is not None:
        begun_OR = finish_OR[:-1] - duration_OR[:-1]
        part_OR = nearness(begun_OR - ready_OR)
        total_OR = part_OR.copy()
        members.total(total_OR)
        part_IOR *= part_OR / total_OR

    none = len(graph.source_O)
    is_last_O = np.all([after_O == none for after_O in (graph.after_O, *graph.outputs)], axis=0)
    flow_OR = np.zeros_like(finish_OR)
    flow_OR[:-1][is_last_O] = nearness(finish_OR[:-1].max() - finish_OR[:-1][is_last_O])
    flow_OR /= flow_OR.sum()
    for start, stop in reversed(list(graph.waves)):
        arriving = flow_OR[start:stop]
        if members is not None:
            arriving = arriving.copy()
            members.total(arriving, slice(start, stop))
        for part_OR, source_O in zip(part_IOR, waited_for, strict=True):
            np.add.at(flow_OR, source_O[start:stop], arriving * part_OR[start:stop])

    by_source_OR = np.empty_like(flow_OR[:-1])
    by_source_OR[graph.source_O] = flow_OR[:-1]
    flow_2RPVM = np.empty_like(times_2RPVM)
    _, ranks, *rest = times_2RPVM.shape
    flow_2RPVM[:] = by_source_OR.reshape(2, *rest, ranks).transpose(0, 4, 1, 2, 3)
    if members is None:
        return flow_2RPVM
    by_rank_2RPVM = np.empty_like(flow_2RPVM)
    by_rank_2RPVM[:, members.order] = flow_2RPVM
    return by_rank_2RPVM
