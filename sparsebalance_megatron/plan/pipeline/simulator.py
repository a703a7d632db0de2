# SPDX-License-Identifier: Apache-2.0
"""Simulator of pipelines: when their operations end, and which delay the end.

An operation starts when its stage has finished the operation before it and its inputs have arrived.
The order and the inputs are those of the :data:`.orders.Schedule` that the times are of. Ranks that
share a micro-batch begin each of its operations together. A lockstep group is one rank.

Shape legend: R data-parallel ranks or candidate pipelines.
"""

import numpy as np

from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes


def makespans_ms(times: OperationTimes) -> np.ndarray:
    """[R] ms until the last operation of each rank ends. Trusts the times to be finite.

    Where the graph holds several pipelines, R are these, and the times are of one rank.
    """
    graph, members = times.graph, times.members
    if graph.last_PR.size == 1 and not members.share:
        return _work_of_one_stage_R(times)
    finish_OX = graph.finish_OX(graph.durations_OX(times.ms_OR), members)
    return np.asarray(finish_OX[graph.last_PR].max(axis=0).reshape(-1))


def operations_through_ms(times: OperationTimes) -> np.ndarray:
    """Longest chain through each operation, [O, R], of ranks that wait for nobody in a layer.

    The makespan less this is by how much the operation may grow without delaying the step, and so
    may the forward and the backward of a micro-batch together: a chain that uses either of them, or
    both, is no longer than the larger of theirs.
    """
    graph, members = times.graph, times.members
    if graph.last_PR.size == 1 and not members.share:
        return np.broadcast_to(_work_of_one_stage_R(times), times.ms_OR.shape)
    tail = graph.durations_OX(times.ms_OR)
    finish = graph.finish_OX(tail.copy(), members)[:-1]
    rest = np.zeros_like(finish)
    for wave in reversed(graph.waves):
        first, *others = graph.followers
        after = tail.take(first[wave], axis=0)
        for follower_O in others:
            np.maximum(after, tail.take(follower_O[wave], axis=0), out=after)
        if members.share:
            members.maximum(after, wave)
        rest[wave] = after
        through_tail = tail[wave]
        through_tail += after
    through = np.empty_like(finish)
    through[graph.run_O] = finish + rest
    return through


def _work_of_one_stage_R(times: OperationTimes) -> np.ndarray:
    """A stage without a pipeline never waits: the step takes the sum of its operations."""
    forwards = len(times.ms_OR) // 2
    work_OR = times.ms_OR[:forwards] + times.ms_OR[forwards:]
    return np.asarray(np.ascontiguousarray(work_OR.T).sum(axis=1))
