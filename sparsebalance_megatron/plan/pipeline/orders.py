# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: the order of every stage's operations, and what each one waits for.

A schedule is a pure function of (stages, micro-batches, chunks per stage). What it returns says
everything: :mod:`.simulator` knows no schedule. Sources of the orders here:
``megatron.core.pipeline_parallel.schedules`` (``get_pp_rank_microbatches``,
``get_schedule_table``).

Shape legend: R data-parallel ranks or candidate pipelines, M micro-batches and U segments of all
pipelines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.groups import Groups


class Operation(NamedTuple):
    """A forward or a backward of one model chunk for one micro-batch, or a segment of one."""

    direction: Direction
    chunk: int
    micro_batch: int
    segment: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineOrder:
    """The operations of a pipeline, or of several side by side, as numbers.

    Operations are numbered by direction, stage, chunk, micro-batch and segment. An operation waits
    for its inputs, and for the one before it on its own stage. Sends are buffered: a stage never
    waits for a receiver.

    >>> megatron_order(2, 3, 1).on_stage_PO
    array([[ 0,  1,  6,  2,  7,  8],
           [ 3,  9,  4, 10,  5, 11]])

    Attributes:
        chunks: of each stage.
        segments_M: segments of each micro-batch.
        on_stage_PO: operations of each stage in the order in which it runs them, pipeline after
            pipeline; all stages run equally many.
        inputs: arrays [O] that each name one operation that every operation waits for; the number
            of operations stands for none.
        step_O: a step for every operation, later than those of all that it waits for; None lets the
            graph find one.
        first_R: the first segment of each pipeline.
    """

    chunks: int
    segments_M: np.ndarray
    on_stage_PO: np.ndarray
    inputs: tuple[np.ndarray, ...]
    step_O: np.ndarray | None = None
    first_R: np.ndarray

    @property
    def stages(self) -> int:
        return len(self.on_stage_PO)

    @cached_property
    def by_stage(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each stage in the order in which it runs them."""
        segments, directions = int(self.segments_M.sum()), list(Direction)
        micro_batch_U = np.repeat(np.arange(len(self.segments_M)), self.segments_M)
        segment_U = np.arange(segments) - np.searchsorted(micro_batch_U, micro_batch_U)
        shape = 2, self.stages, self.chunks, segments
        direction_PO, _, chunk_PO, unit_PO = np.unravel_index(self.on_stage_PO, shape)
        columns = direction_PO, chunk_PO, micro_batch_U[unit_PO], segment_U[unit_PO]
        return tuple(
            tuple(Operation(directions[first], *rest) for first, *rest in of_stage)
            for of_stage in np.stack(columns, axis=2).tolist()
        )


Schedule = Callable[[int, int, int], PipelineOrder]
"""A pure function of (stages, micro-batches, chunks per stage)."""


@dataclass(frozen=True)
class MegatronSchedule:
    """The :data:`Schedule` in which Megatron-Core runs a pipeline.

    With one chunk per stage, 1F1B: a stage is as many forwards ahead as stages follow it. With
    several, they take turns after every group of ``group_size`` micro-batches, the last of which
    may be smaller: Megatron's ``microbatch_group_size_per_vp_stage``, None for the number of
    stages.
    """

    group_size: int | None = None

    def __call__(self, stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
        """The order of a pipeline of these sizes.

        Raises:
            PlanError: a size is below 1, or the micro-batches do not divide into groups that
                Megatron runs: at least as many as there are stages in each, and no more in one than
                there are.
        """
        if min(stages, micro_batches, chunks) < 1:
            raise PlanError(
                f"pipeline of {stages} stages, {chunks} chunks and {micro_batches} micro-batches: "
                "each must be at least 1"
            )
        if chunks == 1:
            return segmented_order([(1,) * micro_batches], stages)
        size = self._group_size(stages, micro_batches)
        table = [
            (chunk, m)
            for first in range(0, micro_batches, size)
            for chunk in range(chunks)
            for m in range(first, min(first + size, micro_batches))
        ]
        chunk_O, micro_batch_O = np.array(table).T
        run_2O = np.stack([chunk_O, chunks - 1 - chunk_O]) * micro_batches + micro_batch_O
        ahead_P1 = 2 * np.arange(stages)[::-1, None] + (chunks - 1) * size
        return PipelineOrder(
            chunks=chunks,
            segments_M=np.ones(micro_batches, dtype=np.int64),
            on_stage_PO=_forwards_ahead(run_2O, np.arange(len(table)), len(table), ahead_P1),
            inputs=(_inputs_along_the_model(stages, chunks, micro_batches),),
            first_R=np.zeros(1, dtype=np.int64),
        )

    def _group_size(self, stages: int, micro_batches: int) -> int:
        size = self.group_size
        if size is None:
            size = stages
        elif not stages <= size <= micro_batches:
            raise PlanError(
                f"schedule interleaved: groups of {size} micro-batches must be from {stages}, "
                f"the pipeline stages, to {micro_batches}, the micro-batches; change "
                "--microbatch-group-size-per-virtual-pipeline-stage"
            )
        last = micro_batches % size
        if 0 < last < stages:
            raise PlanError(
                f"schedule interleaved: {micro_batches} micro-batches are no multiple of {size}, "
                f"the group size, and leave {last} for {stages} pipeline stages; change the global "
                "batch size"
            )
        return size


megatron_order = MegatronSchedule()


@dataclass(frozen=True)
class SegmentedSchedule:
    """1F1B over segments: the :data:`Schedule` in which micro-batches pass a pipeline in pieces.

    Forwards run in order. Backwards run in the same order of micro-batches, with the segments of
    each reversed, because a segment's keys and values collect gradients from later segments. A
    stage is w forwards further ahead than in 1F1B, where w is the most segments of a micro-batch
    less one: these are the orders of the first P stages of 1F1B over P + w stages.

    Data-parallel ranks that share a micro-batch, or run in lockstep, meet inside its operations, so
    their orders must agree although they cut other micro-batches into other numbers of segments.
    Such ranks all take the order of ``most_segments_M`` and leave out what they have not: a
    micro-batch of fewer segments has the last forwards of its position, and so the first backwards.

    Nobody waits for ever, even where a send waits for its receiver:

    1. The forward that is number u of that whole order has, on stage p, the time 2u - w + p, and
       the backward that is number u has 2(u + P) - 1 + w - p. No two on a stage are equal, and a
       stage runs its operations by rising time, whichever are left out.
    2. The input of an operation comes from the neighbouring stage's operation one unit earlier, and
       travels half-way between the two. A send is posted when its operation ends. A receive is
       posted when the operation before its own ends, and where both are of one direction, when the
       output of the former has left. On a stage operations of one direction are at least two units
       apart, so a transfer waits only for what is earlier, and what waits for it is later.
    3. Where ranks meet, the operation has the same time on all of them: their orders have the same
       numbers, and what they share has equally many segments.
    4. All ranks may meet in the first operations of a stage, to gather parameters. Those wait for
       nothing but first operations of other stages.

    ``segments_M``: segments of each micro-batch, at least 1. ``most_segments_M``: of each position,
    the most segments on a rank that this one meets, directly or through others
    (:func:`..groups.Groups.most_RM`); ``segments_M`` where it is empty.

    >>> first_stage = SegmentedSchedule((1, 2))(1, 2, 1).by_stage[0]
    >>> [(o.direction.name[0], o.micro_batch, o.segment) for o in first_stage]
    [('F', 0, 0), ('F', 1, 0), ('B', 0, 0), ('F', 1, 1), ('B', 1, 1), ('B', 1, 0)]
    """

    segments_M: tuple[int, ...]
    most_segments_M: tuple[int, ...] = ()

    def __call__(self, stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
        """The order of a pipeline of these sizes.

        Raises:
            PlanError: stages have several chunks, or the segments are of other micro-batches.
        """
        if chunks != 1:
            raise PlanError(f"schedule segments has 1 chunk per stage, not {chunks}")
        if len(self.segments_M) != micro_batches or min(self.segments_M, default=0) < 1:
            raise PlanError(
                f"schedule segments: segments {self.segments_M} for {micro_batches} micro-batches; "
                "give each at least 1"
            )
        most_M = np.array(self.most_segments_M or self.segments_M)
        if len(most_M) != micro_batches or (most_M < self.segments_M).any():
            raise PlanError(
                f"schedule segments: segments {self.segments_M}, of ranks that this one meets at "
                f"most {self.most_segments_M}"
            )
        whole = segmented_order([most_M.tolist()], stages)
        return _without_others(whole, np.array(self.segments_M), stages)


def _without_others(whole: PipelineOrder, segments_M: np.ndarray, stages: int) -> PipelineOrder:
    """The order with only the last of each micro-batch's segments, so many."""
    if (whole.segments_M == segments_M).all():
        return whole
    units = int(whole.segments_M.sum())
    end_U = np.repeat(np.cumsum(whole.segments_M), whole.segments_M)
    kept_U = np.arange(units) >= end_U - np.repeat(segments_M, whole.segments_M)
    assert whole.step_O is not None
    kept_O = np.tile(kept_U, len(whole.step_O) // units)
    number_O = np.cumsum(kept_O) - 1
    on_stage = number_O[whole.on_stage_PO[kept_O[whole.on_stage_PO]]]
    return PipelineOrder(
        chunks=1,
        segments_M=segments_M,
        on_stage_PO=on_stage.reshape(stages, -1),
        inputs=(_inputs_along_the_model(stages, 1, int(kept_U.sum())),),
        step_O=whole.step_O[kept_O],
        first_R=(np.cumsum(kept_U) - kept_U)[whole.first_R],
    )


def segmented_order(segments_RM: Sequence[Sequence[int]], stages: int) -> PipelineOrder:
    """The order of :class:`SegmentedSchedule` in several pipelines at once.

    With w the most segments of a micro-batch less one, the last stage runs w forwards first, then
    forward and backward in turn. If all operations took one step, it would do so without a pause,
    and its neighbours one step earlier or later: so a step is known for every operation.

    Args:
        segments_RM: segments of each micro-batch, at least 1; pipelines may differ in all of it.
    """
    segments_M = np.fromiter(chain.from_iterable(segments_RM), dtype=np.int64)
    micro_batches_R = np.fromiter(map(len, segments_RM), dtype=np.int64)
    first_micro_batch_R = np.cumsum(micro_batches_R) - micro_batches_R
    segments_R = np.add.reduceat(segments_M, first_micro_batch_R)
    first_R = np.cumsum(segments_R) - segments_R
    further_R = np.maximum.reduceat(segments_M, first_micro_batch_R) - 1
    unit_U = np.arange(segments_R.sum())
    number_U = unit_U - np.repeat(first_R, segments_R)
    stage_P1 = np.arange(stages)[:, None]
    further_U = np.repeat(further_R, segments_R)
    ahead_PU = further_U + stages - 1 - stage_P1
    end_M = np.cumsum(segments_M)
    # The segments of each micro-batch in the opposite order.
    reversed_U = np.repeat(2 * end_M - segments_M - 1, segments_M) - unit_U
    run_2U, segments_U = np.stack([unit_U, reversed_U]), np.repeat(segments_R, segments_R)
    step_2PU = np.stack(
        [
            np.where(number_U <= ahead_PU, number_U, 2 * number_U - further_U) + stage_P1,
            (2 * (number_U + stages) - 1 + further_U)[reversed_U] - stage_P1,
        ]
    )
    return PipelineOrder(
        chunks=1,
        segments_M=segments_M,
        on_stage_PO=_forwards_ahead(run_2U, number_U, segments_U, ahead_PU),
        inputs=(_inputs_along_the_model(stages, 1, len(unit_U)),),
        step_O=step_2PU.reshape(-1),
        first_R=first_R,
    )


def meeting_order(segments_RM: np.ndarray, cp_sizes_RM: np.ndarray, stages: int) -> PipelineOrder:
    """The orders of :class:`SegmentedSchedule` of ranks that may share micro-batches, side by side.

    An operation also waits for all that its like on every other rank of its micro-batch waits for.
    So they begin together.

    Raises:
        PlanError: the ranks of a micro-batch have other numbers of segments.
    """
    groups, segments_J = Groups(cp_sizes_RM), segments_RM.reshape(-1)
    first_J = groups.first_J
    if (segments_J != segments_J[first_J]).any():
        raise PlanError("ranks that share a micro-batch must have equally many segments of it")
    whole = segmented_order(groups.most_RM(segments_RM).tolist(), stages)
    order = _without_others(whole, segments_J, stages)
    largest, none = int(cp_sizes_RM.max()), order.on_stage_PO.size
    if largest == 1:
        return order
    before_O = np.empty(none, dtype=np.int64)
    before_O[order.on_stage_PO[:, 1:]] = order.on_stage_PO[:, :-1]
    before_O[order.on_stage_PO[:, 2 * order.first_R]] = none
    first_unit_J = np.cumsum(segments_J) - segments_J
    unit_U = np.arange(segments_J.sum())
    positions = cp_sizes_RM.shape[1]
    cp_size_J = cp_sizes_RM.reshape(-1)
    member_J = (np.arange(len(first_J)) - first_J) // positions
    inputs = list(order.inputs)
    for further in range(1, largest):
        other_J = first_J + (member_J + further) % cp_size_J * positions
        other_U = unit_U + np.repeat(first_unit_J[other_J] - first_unit_J, segments_J)
        other_O = (np.arange(none).reshape(-1, len(unit_U)) - unit_U + other_U).reshape(-1)
        inputs += [before_O[other_O], order.inputs[0][other_O]]
    return replace(order, inputs=tuple(inputs))


def most_tokens_in_flight(order: PipelineOrder, tokens_U: np.ndarray) -> np.ndarray:
    """[..., P] tokens of chunk forwards whose backward has not ended, at most, on each stage.

    ``tokens_U``: [..., U] of every segment of every micro-batch.
    """
    return np.asarray(tokens_in_flight(order, tokens_U).max(axis=-1))


def tokens_in_flight(order: PipelineOrder, tokens_U: np.ndarray) -> np.ndarray:
    """[..., P, O] tokens of chunk forwards whose backward has not ended, on each stage after each
    of its operations; pipeline after pipeline."""
    tokens_PO = tokens_U[..., order.on_stage_PO % tokens_U.shape[-1]]
    is_forward_PO = order.on_stage_PO < order.on_stage_PO.size // 2
    return np.asarray(np.where(is_forward_PO, tokens_PO, -tokens_PO).cumsum(axis=-1))


def _forwards_ahead(
    run_2O: np.ndarray, number_O: np.ndarray, forwards_O: np.ndarray | int, ahead_PO: np.ndarray
) -> np.ndarray:
    """Operations of each stage in order: some forwards, then forward and backward in turn, then the
    backwards that are left.

    Args:
        run_2O: forwards of any stage, and its backwards, as they follow one another.
        number_O: of each in its pipeline.
        forwards_O: of the pipeline.
        ahead_PO: how many forwards come first.
    """
    stages, forwards = len(ahead_PO), len(number_O)
    places_2PO = np.stack(
        [
            np.maximum(number_O, 2 * number_O - ahead_PO),
            np.minimum(2 * number_O + 1 + ahead_PO, forwards_O + number_O),
        ]
    )
    places_2PO += 2 * (np.arange(forwards) - number_O)
    numbers_2PO = np.arange(2 * stages).reshape(2, stages, 1) * forwards + run_2O[:, None]
    on_stage_PO = np.empty((stages, 2 * forwards), dtype=np.int64)
    on_stage_PO[np.arange(stages)[:, None], places_2PO] = numbers_2PO
    return on_stage_PO


def _inputs_along_the_model(stages: int, chunks: int, segments: int) -> np.ndarray:
    """Data flows through chunk 0 of all stages, then through chunk 1 of all stages, and so on.

    A forward waits for the previous chunk's forward, a backward for the next chunk's backward, the
    backward of the model's last chunk for its own forward.
    """
    none = 2 * stages * chunks * segments
    forward_PVU, backward_PVU = np.arange(none).reshape(2, stages, chunks, segments)
    waited_2PVU = np.full((2, stages, chunks, segments), none)
    waited_2PVU[0, 1:] = forward_PVU[:-1]
    waited_2PVU[0, 0, 1:] = forward_PVU[-1, :-1]
    waited_2PVU[1, :-1] = backward_PVU[1:]
    waited_2PVU[1, -1, :-1] = backward_PVU[0, 1:]
    waited_2PVU[1, -1, -1] = forward_PVU[-1, -1]
    return waited_2PVU.reshape(-1)
