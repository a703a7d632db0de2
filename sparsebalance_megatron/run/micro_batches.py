# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of one rank: from their plan to tokens, in the order of Megatron's schedule.

:class:`SequencePacking` says how a planned micro-batch becomes a packed sequence, and
:class:`MicroBatchIterator` reads the sequences ahead and yields them.
"""

from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.sequence.earlier_segments import segment_slice
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.data.packing import PackedSequence, Sample, pack, packed_cu_seqlens
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch, local_micro_batches
from sparsebalance_megatron.megatron.planned_schedule import StepShape
from sparsebalance_megatron.megatron.sequence_groups import SequenceGroups
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan

_CHUNK_TOKENS = 64
"""Blocks of documents that are dealt out in halves: ranks get even parts of short ones, too."""


@dataclass(frozen=True, kw_only=True)
class SequencePacking:
    """Packs the samples of a run's micro-batches.

    Every rank that shares a packed sequence needs a block of it: a sequence with too few blocks
    gets documents of one token behind its samples, which count as padding.

    ``pad_to_multiple_of``: divisor of the tokens that a rank computes of a packed sequence.
    ``groups``: None in a run where every packed sequence lies on one rank.
    """

    block_size: int
    pad_to_multiple_of: int = 1
    groups: SequenceGroups | None = None

    @property
    def agreement(self) -> ProcessGroup | None:
        """Ranks that may share micro-batches with this one, over a backend of the host."""
        return None if self.groups is None else self.groups.agreement

    def cu_seqlens(self, micro_batch: MicroBatchPlan) -> tuple[int, ...]:
        """Boundaries of the whole packed sequence in tokens, padding included."""
        lengths_tokens = micro_batch.lengths_tokens
        # Slices and segments are padded by themselves.
        if micro_batch.segments > 1:
            return packed_cu_seqlens(lengths_tokens)
        if self.groups is None:
            return packed_cu_seqlens(lengths_tokens, self.pad_to_multiple_of)
        blocks = sum(-(-length // self.block_size) for length in lengths_tokens)
        missing_blocks = max(0, micro_batch.cp_size - blocks)
        return packed_cu_seqlens(lengths_tokens, padding_documents=missing_blocks)

    def held(self, micro_batch: MicroBatchPlan) -> SequenceSlice:
        """Slice of a micro-batch that this rank holds, which may be all of it."""
        group = self._group(micro_batch)
        in_halves = _is_dense(micro_batch) and not group.shares_heads
        return SequenceSlice.dealt(
            self.cu_seqlens(micro_batch),
            group,
            block_size=min(self.block_size, _CHUNK_TOKENS) if in_halves else self.block_size,
            in_halves=in_halves,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def _group(self, micro_batch: MicroBatchPlan) -> SequenceGroup:
        return SequenceGroup() if self.groups is None else self.groups.sharing(micro_batch)

    def slices(self, micro_batch: MicroBatchPlan) -> list[SequenceSlice | None]:
        """What this rank runs of a micro-batch, segment by segment; None is all of it."""
        if micro_batch.segments == 1:
            return [None if self.groups is None else self.held(micro_batch)]
        cu_seqlens, group = self.cu_seqlens(micro_batch), self._group(micro_batch)
        return [
            segment_slice(
                cu_seqlens,
                micro_batch.segment_starts_blocks,
                segment,
                block_size=self.block_size,
                ranks=group,
                in_halves=_is_dense(micro_batch),
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            for segment in range(micro_batch.segments)
        ]

    def packed(self, micro_batch: MicroBatchPlan, samples: list[Sample]) -> list[PackedSequence]:
        """Tokens that this rank computes of a micro-batch, segment by segment, from its samples."""
        whole = pack(samples, self.cu_seqlens(micro_batch))
        return [
            whole if held is None else whole.part(held.tokens_T, padding_tokens=held.padding_tokens)
            for held in self.slices(micro_batch)
        ]

    def computed_tokens(self, micro_batch: MicroBatchPlan) -> list[int]:
        """Tokens that this rank computes of a micro-batch, segment by segment, with padding."""
        member = self._group(micro_batch).member
        return list(map(int, self._tokens_of_ranks(micro_batch)[:, member]))

    def padded_tokens(self, micro_batch: MicroBatchPlan) -> int:
        """Tokens that the micro-batch's ranks compute beside those of its samples."""
        return int(self._tokens_of_ranks(micro_batch).sum()) - micro_batch.tokens

    def _tokens_of_ranks(self, micro_batch: MicroBatchPlan) -> np.ndarray:
        """[segments, ranks] tokens that each rank computes of each segment, padding included."""
        if micro_batch.cp_size == 1:
            held = micro_batch.segment_tokens(self.block_size)
        else:
            last = self.slices(micro_batch)[-1]
            assert last is not None, "ranks that share a micro-batch hold slices"
            held = np.asarray(last.tokens_per_member)
        multiple = self.pad_to_multiple_of
        return np.reshape(-(-held // multiple) * multiple, (micro_batch.segments, -1))


def _is_dense(micro_batch: MicroBatchPlan) -> bool:
    """Whether every layer attends to all documents densely."""
    dense_L = micro_batch.dense_documents_L
    return len(dense_L) > 0 and bool((dense_L == len(micro_batch.samples)).all())


@dataclass(eq=False)
class MicroBatchIterator:
    """Endless iterator over a rank's micro-batches, for Megatron's ``--dataloader-type external``.

    There is one per model chunk; all chunks of a rank walk through the same plans. Packed sequences
    are read ahead: at most those of the step that runs and of the one after it are in memory.

    ``index`` is None where the chunk neither embeds tokens nor computes the loss; ``step`` is that
    of the next micro-batch; ``worker`` reads, on one thread, which keeps the order.
    """

    scheduler: Scheduler
    index: SampleIndex | None
    packing: SequencePacking
    device: torch.device
    data_parallel_rank: int
    chunk: int
    training: bool
    step: int
    worker: Executor
    _position: int = field(default=0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)
    _latest: StepPlan | None = field(default=None, init=False)
    _packed: dict[tuple[int, int], Future[list[PackedSequence]]] = field(
        default_factory=dict, init=False
    )
    _segments: deque[LocalMicroBatch] = field(default_factory=deque, init=False)

    def __iter__(self) -> "MicroBatchIterator":
        return self

    def next_step(self) -> StepShape:
        """The shape of the step that begins."""
        planned, job = self.scheduler.planned(self.step), self.scheduler.job
        if job.order is None and not planned.in_segments:
            return StepShape(planned.micro_batches)
        order = planned.order(self.data_parallel_rank, job)
        tokens_MU = map(self.packing.computed_tokens, self._micro_batches(planned))
        return StepShape(planned.micro_batches, order, list(tokens_MU))

    def __next__(self) -> LocalMicroBatch:
        if self._segments:
            return self._segments.popleft()
        planned, step, position = self.scheduler.planned(self.step), self.step, self._position
        micro_batches = self._micro_batches(planned)
        plan = micro_batches[position]
        if self.index is not None and position == 0:
            self.read_ahead(planned)
            self.scheduler.follow(self.read_ahead)
        self._position += 1
        if self._position == len(micro_batches):
            self.step, self._position = self.step + 1, 0
        packed = None if self.index is None else self.packed(planned, position)
        self._segments += local_micro_batches(
            plan,
            self.packing.cu_seqlens(plan),
            self.packing.slices(plan),
            block_size=self.packing.block_size,
            observe=self.training,
            device=self.device,
            step=step,
            chunk=self.chunk,
            inputs=None if packed is None else [vars(each) for each in packed],
        )
        return self._segments.popleft()

    def read_ahead(self, planned: PlannedStep) -> None:
        """Start to read a step's samples, unless they were the last to be started; any thread."""
        with self._lock:
            plan = planned.plan
            if plan is self._latest:
                return
            self._latest = plan
            for place in [known for known in self._packed if known[0] < plan.step - 1]:
                self._packed.pop(place).cancel()
            for position, micro_batch in enumerate(self._micro_batches(planned)):
                try:
                    packed = self.worker.submit(self._read, planned, micro_batch)
                except RuntimeError:
                    # The process ends: executors take nothing more, and no plan will be needed.
                    return
                self._packed[plan.step, position] = packed

    def packed(self, planned: PlannedStep, position: int) -> list[PackedSequence]:
        """One micro-batch; waits for it. Reads it now if it was not begun or was taken before."""
        with self._lock:
            packed = self._packed.pop((planned.plan.step, position), None)
        if packed is not None:
            return packed.result()
        return self._read(planned, self._micro_batches(planned)[position])

    def _micro_batches(self, planned: PlannedStep) -> tuple[MicroBatchPlan, ...]:
        return planned.plan.for_rank(self.data_parallel_rank).micro_batches

    def _read(self, planned: PlannedStep, micro_batch: MicroBatchPlan) -> list[PackedSequence]:
        assert self.index is not None, "asked only for samples that the chunk reads"
        samples = [self.index.read(int(planned.samples[i])) for i in micro_batch.samples]
        return self.packing.packed(micro_batch, samples)

    def save_state(self) -> dict[str, Any]:
        """Position, for Megatron's ``--dataloader-save``; resuming needs consumed samples only."""
        return {"consumed_samples": self.scheduler.batch_sizes.first_sample(self.step)}
