# SPDX-License-Identifier: Apache-2.0
"""From the slots of a plan to rows of tokens: their boundaries, padding, and this rank's share."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebalance_megatron.data.packing import (
    PackedRow,
    Sample,
    pack,
    packed_cu_seqlens,
    padding_tokens,
)
from sparsebalance_megatron.megatron.context_groups import ContextGroups
from sparsebalance_megatron.megatron.row_share import (
    RowShare,
    member_tokens,
    share_of_row,
)
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
    groups: ContextGroups | None = None

    def cu_seqlens(self, slot: MicroBatchPlan) -> tuple[int, ...]:
        """Boundaries of the whole row in tokens, padding included."""
        return packed_cu_seqlens(slot.lengths_tokens, *self._padding(slot))

    def share(self, slot: MicroBatchPlan) -> RowShare | None:
        """What this rank computes of one of its slots; None where every row lies on one rank.

        Raises:
            PlanError: no group was made for the ranks of the slot.
        """
        if self.groups is None:
            return None
        return share_of_row(
            self.cu_seqlens(slot),
            self.groups.of_slot(slot),
            block_size=self.block_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def row(self, slot: MicroBatchPlan, samples: list[Sample]) -> PackedRow:
        """What this rank computes of one of its slots, from the samples of all of it."""
        pad_to_multiple_of, padding_documents = self._padding(slot)
        row = pack(
            samples, pad_to_multiple_of=pad_to_multiple_of, padding_documents=padding_documents
        )
        share = self.share(slot)
        if share is None:
            return row
        return row.part(share.tokens_T, padding_tokens=share.padding_tokens)

    def padded_tokens(self, slot: MicroBatchPlan) -> int:
        """Tokens that the slot's ranks compute beside those of its samples."""
        if slot.width == 1:
            return padding_tokens(slot.tokens, self.pad_to_multiple_of)
        cu_seqlens = self.cu_seqlens(slot)
        padding = cu_seqlens[-1] - slot.tokens
        shares = member_tokens(cu_seqlens, slot.width, block_size=self.block_size)
        return padding + sum(padding_tokens(tokens, self.pad_to_multiple_of) for tokens in shares)

    def _padding(self, slot: MicroBatchPlan) -> tuple[int, int]:
        """What the whole row divides by, and its padding documents."""
        if self.groups is None:
            return self.pad_to_multiple_of, 0
        blocks = sum(-(-length // self.block_size) for length in slot.lengths_tokens)
        return 1, max(0, slot.width - blocks)
