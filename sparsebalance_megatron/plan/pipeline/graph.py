# SPDX-License-Identifier: Apache-2.0
"""Operations of a schedule in waves: all operations of a wave can be simulated at once.

Shape legend: R data-parallel ranks or candidate pipelines, X columns of times.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, starmap

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.groups import Members
from sparsebalance_megatron.plan.pipeline.orders import (
    PipelineOrder,
    Schedule,
)


@dataclass(frozen=True, kw_only=True)
class PipelineGraph:
    """The operations of an order, with what each waits for, in the order of the simulator.

    The simulator runs operation ``run_O[i]`` of the order as its i-th. All other arrays are in the
    simulator's order. The number of operations stands for none.

    Attributes:
        order: the operations and their numbers.
        run_O: numbers of the operations that the simulator runs one after another.
        before_O: the previous operation on the same stage.
        inputs: arrays that each hold one operation that every operation waits for.
        wave_edges: where waves begin, and the number of operations. An operation waits only for
            operations of earlier waves.
        last_PR: the last operation of every stage of each pipeline.
    """

    order: PipelineOrder
    run_O: np.ndarray
    before_O: np.ndarray
    inputs: tuple[np.ndarray, ...]
    wave_edges: tuple[int, ...]
    last_PR: np.ndarray

    @property
    def shape_2PVM(self) -> tuple[int, int, int, int]:
        return 2, self.order.stages, self.order.chunks, len(self.order.segments_M)

    @cached_property
    def waves(self) -> list[slice]:
        """The operations of each wave."""
        return list(starmap(slice, pairwise(self.wave_edges)))

    @cached_property
    def micro_batch_O(self) -> np.ndarray:
        """The micro-batch of each operation."""
        segments_M = self.order.segments_M
        of_segments = np.repeat(np.arange(len(segments_M)), segments_M)
        return np.asarray(of_segments[self.run_O % len(of_segments)])

    @cached_property
    def followers(self) -> tuple[np.ndarray, ...]:
        """Arrays that each hold one operation that waits for every operation."""
        none = len(self.run_O)
        waited_for = np.concatenate([self.before_O, *self.inputs])
        sorted_by_it = np.argsort(waited_for, kind="stable")
        known = sorted_by_it[: np.count_nonzero(waited_for < none)]
        waited_for = waited_for[known]
        # Counted among those that wait for the same operation.
        number = np.arange(len(known)) - np.searchsorted(waited_for, waited_for)
        followers = np.full((number.max(initial=0) + 1, none), none)
        followers[number, waited_for] = known % none
        return tuple(followers)

    def durations_OX(self, ms_OX: np.ndarray) -> np.ndarray:
        """Every operation's time as they run, [O + 1, X]; the last row is zero, for none."""
        durations = np.zeros((len(self.run_O) + 1, ms_OX.shape[1]))
        ms_OX.take(self.run_O, axis=0, out=durations[:-1], mode="clip")
        return durations

    def finish_OX(self, finish_OX: np.ndarray, members: Members) -> np.ndarray:
        """End of every operation, in the place of its duration; last, the step's start."""
        take = finish_OX.take
        for wave, before, inputs in self._waited_for:
            ready = take(before, 0)
            for waited in inputs:
                ready = np.maximum(ready, take(waited, 0))
            if members.share:
                members.maximum(ready, wave)
            ended = finish_OX[wave]
            ended += ready
        return finish_OX

    @cached_property
    def _waited_for(self) -> list[tuple[slice, np.ndarray, tuple[np.ndarray, ...]]]:
        """The slice of every wave, with what it waits for."""
        before, *inputs = (
            map(waited_O.__getitem__, self.waves) for waited_O in (self.before_O, *self.inputs)
        )
        return list(zip(self.waves, before, zip(*inputs, strict=True), strict=True))


@lru_cache(maxsize=2)
def order_to_run(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
    """The order that a schedule gives, for training; the last ones are kept.

    Raises:
        PlanError: stages of one chunk run forwards in another order than micro-batches are read, or
            wait for one another for ever where a send waits for its receiver.
    """
    order = schedule(stages, micro_batches, chunks)
    if chunks > 1:
        return order
    forward_PO = order.on_stage_PO < order.on_stage_PO.size // 2
    forwards_PU = order.on_stage_PO[forward_PO].reshape(stages, -1)
    if (np.diff(forwards_PU) < 0).any():
        raise PlanError("order: every stage must run its forwards by rising micro-batch")
    if order.step_O is None:
        _longest_chains_O(_waited_for_by_transfers(order))
    return order


def _waited_for_by_transfers(order: PipelineOrder) -> np.ndarray:
    """[3, 2 O]: what every operation of stages of one chunk waits for, then what the transfer of
    its output waits for, where ``megatron.planned_schedule`` runs the order.

    1. An operation waits for the one before it on its stage, for the transfer of that one's output,
       and for its input.
    2. A transfer waits for the operation that gives it, and for the one before its receiver; where
       both of these are of one direction, for the transfer of that one's output, too.
    """
    none = order.on_stage_PO.size
    number_O, nothing = np.arange(none), 2 * none
    stage_O = number_O // (none // (2 * order.stages)) % order.stages
    before_O = np.full(none, nothing)
    before_O[order.on_stage_PO[:, 1:]] = order.on_stage_PO[:, :-1]
    transfer_before_O = np.where(before_O < nothing, none + before_O, nothing)
    input_O = np.where(order.inputs[0] < none, order.inputs[0], nothing)
    receivers = np.flatnonzero(input_O < nothing)
    receivers = receivers[stage_O[receivers] != stage_O[input_O[receivers]]]
    are_alike_O = (before_O < none // 2) == (number_O < none // 2)
    ready_2O = np.full((2, none), nothing)
    ready_2O[0, input_O[receivers]] = before_O[receivers]
    ready_2O[1, input_O[receivers]] = np.where(are_alike_O, transfer_before_O, nothing)[receivers]
    of_operations_3O = np.stack([before_O, transfer_before_O, input_O])
    return np.concatenate([of_operations_3O, np.vstack([number_O, ready_2O])], axis=1)


@lru_cache(maxsize=32)
def graph_of(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> PipelineGraph:
    """The graph of a schedule for these numbers.

    Raises:
        PlanError: the schedule does not exist for them, deadlocks, or leaves out a forward or a
            backward of a micro-batch.
    """
    order = schedule(stages, micro_batches, chunks)
    found = order.stages, order.chunks, len(order.segments_M)
    if found != (stages, chunks, micro_batches):
        raise PlanError(
            "schedule has {} stages, {} chunks, {} micro-batches, ".format(*found)
            + f"times are of {stages}, {chunks}, {micro_batches}"
        )
    shape = 2, stages, chunks, int(order.segments_M.sum())
    numbers = np.arange(np.prod(shape)).reshape(shape).swapaxes(0, 1).reshape(stages, -1)
    if not np.array_equal(np.sort(order.on_stage_PO, axis=1), numbers):
        raise PlanError("schedule: a stage does not run each of its operations once")
    graph = graph_of_order(order)
    waves = np.repeat(np.arange(len(graph.waves)), np.diff(graph.wave_edges))
    waves = np.append(waves, -1)
    if any((waves[waited_O] >= waves[:-1]).any() for waited_O in (graph.before_O, *graph.inputs)):
        raise PlanError("schedule: an operation's step is not later than what it waits for")
    return graph


def graph_of_order(order: PipelineOrder) -> PipelineGraph:
    """The graph of an order, which is taken to run each operation once."""
    none = order.on_stage_PO.size
    first_R = 2 * order.chunks * order.first_R
    end_R = np.append(first_R[1:], order.on_stage_PO.shape[1])
    running_O = order.on_stage_PO.reshape(-1)
    before_O = np.empty(none, dtype=np.int64)
    before_O[running_O[1:]] = running_O[:-1]
    before_O[order.on_stage_PO[:, first_R]] = none
    step_O = order.step_O
    if step_O is None:
        step_O = _longest_chains_O(np.stack([before_O, *order.inputs]))
    # Of small types, numpy counts instead of comparing.
    run_O = np.argsort(step_O.astype(np.min_scalar_type(step_O.max())), kind="stable")
    runs_as = np.empty(none + 1, dtype=np.int64)
    runs_as[run_O], runs_as[none] = np.arange(none), none
    edges = np.flatnonzero(np.diff(step_O.take(run_O))) + 1
    return PipelineGraph(
        order=order,
        run_O=run_O,
        before_O=runs_as.take(before_O.take(run_O)),
        inputs=tuple(runs_as.take(input_O.take(run_O)) for input_O in order.inputs),
        wave_edges=(0, *edges.tolist(), none),
        last_PR=runs_as[order.on_stage_PO[:, end_R - 1]],
    )


def _longest_chains_O(waited_for: np.ndarray) -> np.ndarray:
    """Length of the longest chain of operations that ends just before each operation.

    Args:
        waited_for: [I, O] operations, the number of operations for none.

    Raises:
        PlanError: operations wait for one another.
    """
    none = waited_for.shape[1]
    length = np.append(np.zeros(none, dtype=np.int64), -1)
    for _ in range(none + 1):
        found_O = length[waited_for].max(axis=0) + 1
        if np.array_equal(found_O, length[:-1]):
            return found_O
        length[:-1] = found_O
    raise PlanError("schedule deadlocks: no stage can run its next operation")
