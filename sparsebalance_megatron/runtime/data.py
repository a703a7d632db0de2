# SPDX-License-Identifier: Apache-2.0
"""The external data iterator: one rank's packed micro-batches, in the order its plan gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sparsebalance_megatron.data.packing import PackedMicroBatch, pack, packed_cu_seqlens
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.step_plan import JobShape, MicroBatchPlan
from sparsebalance_megatron.runtime.scheduler import PlannedStep


class Schedule(Protocol):
    """Where plans come from: training's scheduler, or the fixed one of evaluation."""

    job: JobShape

    def planned(self, step: int) -> PlannedStep: ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One slot as the forward step gets it.

    ``row`` holds tokens and labels on stages that read them (embedding or loss) and is None on
    all others: ``cu_seqlens`` and budgets follow from the plan alone.
    """

    step: int
    position: int
    chunk: int
    training: bool
    plan: MicroBatchPlan
    cu_seqlens: tuple[int, ...]
    row: PackedMicroBatch | None


class MicroBatchIterator:
    """Endless iterator over (step, position), from a number of samples already consumed.

    Megatron takes it through ``--dataloader-type external``. There is one per model chunk; all
    chunks of a rank walk through the same plans.

    Args:
        data_parallel_rank: whose slots to yield.
        chunk: virtual stage, 0 without virtual pipelines.
        reads_tokens: whether this chunk embeds tokens or computes the loss.
        consumed_samples: where to start, a multiple of the global batch size.
        global_batch_size: samples per step.
        pad_to_multiple_of: row length in tokens divides by this (sequence parallelism).
    """

    def __init__(
        self,
        schedule: Schedule,
        index: SampleIndex,
        *,
        data_parallel_rank: int,
        chunk: int,
        reads_tokens: bool,
        training: bool,
        consumed_samples: int,
        global_batch_size: int,
        pad_to_multiple_of: int,
    ) -> None:
        self._schedule = schedule
        self._index = index
        self._data_parallel_rank = data_parallel_rank
        self._chunk = chunk
        self._reads_tokens = reads_tokens
        self._training = training
        self._global_batch_size = global_batch_size
        self._pad_to_multiple_of = pad_to_multiple_of
        self._step = consumed_samples // global_batch_size
        self._position = 0

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> MicroBatch:
        planned = self._schedule.planned(self._step)
        rank_plan = planned.plan.ranks[self._data_parallel_rank]
        plan = rank_plan.micro_batches[self._position]
        row = self._read(planned, plan) if self._reads_tokens else None
        micro_batch = MicroBatch(
            step=self._step,
            position=self._position,
            chunk=self._chunk,
            training=self._training,
            plan=plan,
            cu_seqlens=packed_cu_seqlens(plan.lengths_tokens, self._pad_to_multiple_of),
            row=row,
        )
        self._position += 1
        if self._position == len(rank_plan.micro_batches):
            self._step, self._position = self._step + 1, 0
        return micro_batch

    def _read(self, planned: PlannedStep, plan: MicroBatchPlan) -> PackedMicroBatch:
        samples = [self._index.read(int(planned.samples[i])) for i in plan.samples]
        return pack(samples, pad_to_multiple_of=self._pad_to_multiple_of)

    def save_state(self) -> dict[str, Any]:
        """Position, for Megatron's ``--dataloader-save``; resuming needs consumed samples only."""
        return {"consumed_samples": self._step * self._global_batch_size}
