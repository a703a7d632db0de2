# SPDX-License-Identifier: Apache-2.0
"""The external data iterator: one rank's packed micro-batches, in the order its plan gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sparsebalance_megatron.attention.context_parallel.slice import SequenceSlice
from sparsebalance_megatron.data.packing import PackedRow
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.training.row_reader import RowReader
from sparsebalance_megatron.training.rows import RowPacking


class Schedule(Protocol):
    """Where plans come from: training's scheduler, or the fixed one of evaluation."""

    def planned(self, step: int) -> PlannedStep: ...

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Have ``then`` called with the next step's plan, if it is made ahead."""


@dataclass(frozen=True, kw_only=True)
class LocalMicroBatch:
    """One micro-batch as this rank runs it, from the iterator to the step's end.

    ``step``, ``position`` and ``chunk`` say where it runs: training step, place in the rank's order
    and virtual stage. ``cu_seqlens`` bounds its samples in the packed sequence, and padding;
    ``sequence`` is this rank's slice of it, None where every sequence lies on one rank. ``row``
    holds tokens and labels of that on stages that read them (embedding or loss) and is None on all
    others: boundaries, slices and budgets follow from the plan alone.
    """

    step: int
    position: int
    chunk: int
    training: bool
    plan: MicroBatchPlan
    cu_seqlens: tuple[int, ...]
    sequence: SequenceSlice | None
    row: PackedRow | None


class MicroBatchIterator:
    """Endless iterator over (step, position).

    Megatron takes it through ``--dataloader-type external``. There is one per model chunk; all
    chunks of a rank walk through the same plans.

    Args:
        data_parallel_rank: whose slots to yield.
        chunk: virtual stage, 0 without virtual pipelines.
        reader: of this rank's rows; None where the chunk neither embeds tokens nor computes the
            loss.
        step: where to start.
        batch_sizes: samples of every step.
        packing: how slots become rows.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        data_parallel_rank: int,
        chunk: int,
        reader: RowReader | None,
        training: bool,
        step: int,
        batch_sizes: BatchSizes,
        packing: RowPacking,
    ) -> None:
        self._schedule = schedule
        self._data_parallel_rank = data_parallel_rank
        self._chunk = chunk
        self._reader = reader
        self._training = training
        self._batch_sizes = batch_sizes
        self._packing = packing
        self._step = step
        self._position = 0

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> LocalMicroBatch:
        planned = self._schedule.planned(self._step)
        rank_plan = planned.plan.for_rank(self._data_parallel_rank)
        plan = rank_plan.micro_batches[self._position]
        micro_batch = LocalMicroBatch(
            step=self._step,
            position=self._position,
            chunk=self._chunk,
            training=self._training,
            plan=plan,
            cu_seqlens=self._packing.cu_seqlens(plan),
            sequence=self._packing.slice(plan),
            row=self._row(planned),
        )
        self._position += 1
        if self._position == len(rank_plan.micro_batches):
            self._step, self._position = self._step + 1, 0
        return micro_batch

    def _row(self, planned: PlannedStep) -> PackedRow | None:
        """The current row; at a step's first, reading of the whole step and the next begins."""
        if self._reader is None:
            return None
        if self._position == 0:
            self._reader.begin(planned)
            self._schedule.follow(self._reader.begin)
        return self._reader.row(planned, self._position)

    def save_state(self) -> dict[str, Any]:
        """Position, for Megatron's ``--dataloader-save``; resuming needs consumed samples only."""
        return {"consumed_samples": self._batch_sizes.first_sample(self._step)}
