# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: the order of every stage's operations, and what each one waits for.

A schedule is a pure function of (stages, micro-batches, chunks per stage). What it returns says
everything: :mod:`.simulator` knows no schedule. Sources of the orders here:
``megatron.core.pipeline_parallel.schedules`` (``get_pp_rank_microbatches``,
``get_schedule_table``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.plan_error import PlanError


class Operation(NamedTuple):
    """A forward or a backward of one model chunk for one micro-batch, or a segment of one."""

    direction: Direction
    chunk: int
    micro_batch: int
    segment: int = 0


StageOperation = tuple[int, Operation]
"""(stage, operation)."""


@dataclass(frozen=True, kw_only=True)
class PipelineOrder:
    """``by_stage``: operations in the order each stage runs them. ``inputs``: what each waits for.

    Besides, an operation waits for the one before it on its own stage. Sends are buffered: a stage
    never waits for a receiver.
    """

    by_stage: tuple[tuple[Operation, ...], ...]
    inputs: Mapping[StageOperation, tuple[StageOperation, ...]]


Schedule = Callable[[int, int, int], PipelineOrder]
"""A function of (stages, micro-batches, chunks per stage)."""


def schedule_name(stages: int, chunks: int) -> str:
    """The name of the schedule that Megatron-Core's ``get_forward_backward_func`` picks."""
    if stages == 1:
        return "no_pipeline"
    return "interleaved" if chunks > 1 else "1f1b"


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
        size = self._group_size(stages, micro_batches) if chunks > 1 else micro_batches
        table = [
            (chunk, m)
            for first in range(0, micro_batches, size)
            for chunk in range(chunks)
            for m in range(first, min(first + size, micro_batches))
        ]
        forwards = [Operation(Direction.FORWARD, chunk, m) for chunk, m in table]
        backwards = [Operation(Direction.BACKWARD, chunks - 1 - chunk, m) for chunk, m in table]
        per_stage = 2 if chunks > 1 else 1
        return PipelineOrder(
            by_stage=tuple(
                _forwards_ahead(
                    forwards, backwards, per_stage * (stages - stage - 1) + (chunks - 1) * size
                )
                for stage in range(stages)
            ),
            inputs=_inputs_along_the_model(stages, micro_batches, chunks),
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
    less one: these are the orders of the first P stages of 1F1B over P + w stages. So no stage
    waits for ever where a send and a receive are posted together.

    ``segments_M``: segments of each micro-batch, at least 1.

    >>> first_stage = SegmentedSchedule((1, 2))(1, 2, 1).by_stage[0]
    >>> [(o.direction.name[0], o.micro_batch, o.segment) for o in first_stage]
    [('F', 0, 0), ('F', 1, 0), ('B', 0, 0), ('F', 1, 1), ('B', 1, 1), ('B', 1, 0)]
    """

    segments_M: tuple[int, ...]

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
        forwards, backwards = (
            [
                Operation(direction, 0, m, segment)
                for m, segments in enumerate(self.segments_M)
                for segment in range(segments)[::step]
            ]
            for direction, step in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1))
        )
        further_ahead = max(self.segments_M) - 1
        return PipelineOrder(
            by_stage=tuple(
                _forwards_ahead(forwards, backwards, stages - stage - 1 + further_ahead)
                for stage in range(stages)
            ),
            inputs=_inputs_along_the_model(stages, micro_batches, 1, self.segments_M),
        )


def _forwards_ahead(
    forwards: list[Operation], backwards: list[Operation], ahead: int
) -> tuple[Operation, ...]:
    """``ahead`` forwards, then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])


def _inputs_along_the_model(
    stages: int, micro_batches: int, chunks: int, segments_M: Sequence[int] | None = None
) -> dict[StageOperation, tuple[StageOperation, ...]]:
    """Data flows through chunk 0 of all stages, then through chunk 1 of all stages, and so on.

    A forward waits for the previous chunk's forward, a backward for the next chunk's backward, the
    backward of the model's last chunk for its own forward.
    """
    places = [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
    inputs: dict[StageOperation, tuple[StageOperation, ...]] = {}
    for m, segments in enumerate(segments_M or [1] * micro_batches):
        for s in range(segments):
            path = [(stage, Operation(Direction.FORWARD, chunk, m, s)) for stage, chunk in places]
            path += [
                (stage, Operation(Direction.BACKWARD, chunk, m, s)) for stage, chunk in places[::-1]
            ]
            inputs[path[0]] = ()
            inputs |= {node: (before,) for before, node in itertools.pairwise(path)}
    return inputs
