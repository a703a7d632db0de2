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


def no_pipeline(stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
    """One stage: every micro-batch runs forward and backward before the next one.

    Raises:
        PlanError: there are more stages.
    """
    _check_sizes("no_pipeline", stages, micro_batches, chunks)
    if stages != 1:
        raise PlanError(f"schedule no_pipeline has 1 stage, not {stages}; use 1f1b")
    order: list[Operation] = []
    for m in range(micro_batches):
        order += [Operation(Direction.FORWARD, chunk, m) for chunk in range(chunks)]
        order += [Operation(Direction.BACKWARD, chunk, m) for chunk in reversed(range(chunks))]
    return PipelineOrder(
        by_stage=(tuple(order),), inputs=_inputs_along_the_model(stages, micro_batches, chunks)
    )


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
    """1F1B: a stage is as many forwards ahead as stages follow it.

    Raises:
        PlanError: stages have several chunks.
    """
    _check_sizes("1f1b", stages, micro_batches, chunks)
    if chunks != 1:
        raise PlanError(f"schedule 1f1b has 1 chunk per stage, not {chunks}")
    forwards = [Operation(Direction.FORWARD, 0, m) for m in range(micro_batches)]
    backwards = [Operation(Direction.BACKWARD, 0, m) for m in range(micro_batches)]
    return PipelineOrder(
        by_stage=tuple(
            _forwards_ahead(forwards, backwards, stages - stage - 1) for stage in range(stages)
        ),
        inputs=_inputs_along_the_model(stages, micro_batches, chunks),
    )


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
        _check_sizes("segments", stages, micro_batches, chunks)
        if chunks != 1:
            raise PlanError(f"schedule segments has 1 chunk per stage, not {chunks}")
        if len(self.segments_M) != micro_batches or min(self.segments_M) < 1:
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


def interleaved(
    stages: int, micro_batches: int, chunks: int, group_size: int | None = None
) -> PipelineOrder:
    """1F1B over several chunks per stage, which take turns after every group of micro-batches.

    Args:
        group_size: micro-batches of a group, None for as many as there are stages; the last group
            is what is left.

    Raises:
        PlanError: the micro-batches do not divide into groups that Megatron runs: at least as many
            as there are stages in each, and no more in one than there are.
    """
    _check_sizes("interleaved", stages, micro_batches, chunks)
    if group_size is None:
        group_size = stages
    elif not stages <= group_size <= micro_batches:
        raise PlanError(
            f"schedule interleaved: groups of {group_size} micro-batches must be from {stages}, "
            f"the pipeline stages, to {micro_batches}, the micro-batches; change "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )
    last = micro_batches % group_size
    if 0 < last < stages:
        raise PlanError(
            f"schedule interleaved: {micro_batches} micro-batches are no multiple of {group_size}, "
            f"the group size, and leave {last} for {stages} pipeline stages; change the global "
            "batch size"
        )
    table = [
        (chunk, m)
        for first in range(0, micro_batches, group_size)
        for chunk in range(chunks)
        for m in range(first, min(first + group_size, micro_batches))
    ]
    forwards = [Operation(Direction.FORWARD, chunk, m) for chunk, m in table]
    backwards = [Operation(Direction.BACKWARD, chunks - 1 - chunk, m) for chunk, m in table]
    return PipelineOrder(
        by_stage=tuple(
            _forwards_ahead(
                forwards, backwards, 2 * (stages - stage - 1) + (chunks - 1) * group_size
            )
            for stage in range(stages)
        ),
        inputs=_inputs_along_the_model(stages, micro_batches, chunks),
    )


SCHEDULES: Mapping[str, Schedule] = {
    "no_pipeline": no_pipeline,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def schedule_name(stages: int, chunks: int) -> str:
    """The schedule that Megatron-Core's ``get_forward_backward_func`` picks."""
    if stages == 1:
        return "no_pipeline"
    return "interleaved" if chunks > 1 else "1f1b"


@dataclass(frozen=True)
class MegatronSchedule:
    """The :data:`Schedule` in which Megatron-Core runs a pipeline.

    ``group_size`` is its ``microbatch_group_size_per_vp_stage``, which counts only where stages
    have several chunks; None is Megatron's default, the number of stages.
    """

    group_size: int | None = None

    def __call__(self, stages: int, micro_batches: int, chunks: int) -> PipelineOrder:
        """The order of a pipeline of these sizes.

        Raises:
            PlanError: the schedule that Megatron picks does not exist for these numbers.
        """
        name = schedule_name(stages, chunks)
        if name == "interleaved":
            return interleaved(stages, micro_batches, chunks, self.group_size)
        return SCHEDULES[name](stages, micro_batches, chunks)


megatron_order = MegatronSchedule()


def _check_sizes(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    if min(stages, micro_batches, chunks) < 1:
        raise PlanError(
            f"schedule {name}: {stages} stages, {chunks} chunks and {micro_batches} "
            "micro-batches; each must be at least 1"
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
