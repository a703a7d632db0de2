# SPDX-License-Identifier: Apache-2.0
"""From planned micro-batches to packed tokens: boundaries, padding, and this rank's slice."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebalance_megatron.attention.context_parallel.slice import (
    SequenceGroup,
    SequenceSlice,
)
from sparsebalance_megatron.data.packing import (
    PackedRow,
    Sample,
    pack,
    packed_cu_seqlens,
    padding_tokens,
)
from sparsebalance_megatron.megatron.sequence_groups import SequenceGroups
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan


@dataclass(frozen=True, kw_only=True)
class RowPacking:
    """How a run packs its rows.

    Every rank that shares a row needs a block of it: a row with too few blocks gets documents of
    one token behind its samples, which count as padding.

    Attributes:
        block_size: tokens of a full block.
        pad_to_multiple_of: tokens that what a rank computes of a row divides by (sequence
            parallelism).
        groups: None in a run where every row lies on one rank.
    """

    block_size: int
    pad_to_multiple_of: int = 1
    groups: SequenceGroups | None = None

    def cu_seqlens(self, slot: MicroBatchPlan) -> tuple[int, ...]:
        """Boundaries of the whole row in tokens, padding included."""
        return packed_cu_seqlens(slot.lengths_tokens, *self._padding(slot))

    def slice(self, slot: MicroBatchPlan) -> SequenceSlice | None:
        """What this rank holds of one of its micro-batches; None where no sequence is shared.

        Raises:
            PlanError: no group was made for the ranks of the micro-batch.
        """
        return None if self.groups is None else self._slice(slot, self.groups.of(slot))

    def _slice(self, slot: MicroBatchPlan, group: SequenceGroup) -> SequenceSlice:
        return SequenceSlice.dealt(
            self.cu_seqlens(slot),
            group,
            block_size=self.block_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def row(self, slot: MicroBatchPlan, samples: list[Sample]) -> PackedRow:
        """What this rank computes of one of its slots, from the samples of all of it."""
        pad_to_multiple_of, padding_documents = self._padding(slot)
        row = pack(
            samples, pad_to_multiple_of=pad_to_multiple_of, padding_documents=padding_documents
        )
        held = self.slice(slot)
        if held is None:
            return row
        return row.part(held.tokens_T, padding_tokens=held.padding_tokens)

    def padded_tokens(self, slot: MicroBatchPlan) -> int:
        """Tokens that the slot's ranks compute beside those of its samples."""
        if slot.width == 1:
            return padding_tokens(slot.tokens, self.pad_to_multiple_of)
        held = self._slice(slot, SequenceGroup(members=slot.width))
        padding = held.cu_seqlens[-1] - slot.tokens
        return padding + sum(
            padding_tokens(tokens, self.pad_to_multiple_of) for tokens in held.tokens_per_member
        )

    def _padding(self, slot: MicroBatchPlan) -> tuple[int, int]:
        """What the whole row divides by, and its padding documents."""
        if self.groups is None:
            return self.pad_to_multiple_of, 0
        blocks = sum(-(-length // self.block_size) for length in slot.lengths_tokens)
        return 1, max(0, slot.width - blocks)
