# SPDX-License-Identifier: Apache-2.0
"""A member's share of a packed row, on its device. Built once per micro-batch.

Shape legend: T tokens (of the packed row or of a member's row), N blocks, Q rows and C heads that
select, K places of a list, W members of the context group, X columns of a table (N + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners
from sparsebalance_megatron.attention.host_copy import arrays_to, copied_to
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import ColumnLists, Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class RowShard:
    """What one member of a context group holds of a packed row.

    Every tensor is int64 on the device of the row. A context group of one member holds the row as
    it is: ``local_layout`` is ``row_layout``.

    Attributes:
        owners: who holds which block, on the host.
        member: this member's number in the group.
        row_layout: the blocks of the packed row.
        local_layout: the blocks of this member's row.
        token_T: for every token of this member's row, its number in the packed row.
        own_block_N: for every block of this member's row, its number in the packed row.
    """

    owners: BlockOwners
    member: int
    row_layout: PackedLayout
    local_layout: PackedLayout
    token_T: Tensor
    own_block_N: Tensor

    @property
    def members(self) -> int:
        return self.owners.members

    def local(self, x_T: Tensor) -> Tensor:
        """Cut this member's tokens out of something with one entry per token of the packed row."""
        return x_T.index_select(0, self.token_T)

    def selection(
        self,
        *,
        indices_QCK: Tensor,
        counts_QC: Tensor,
        by_token: bool,
        columns: ColumnLists | None = None,
    ) -> Selection:
        """Lists of this member's queries over the blocks of the packed row."""
        return Selection(
            indices_QCK=indices_QCK,
            counts_QC=counts_QC,
            by_token=by_token,
            query_layout=self.local_layout,
            kv_layout=self.row_layout,
            own_block_N=self.own_block_N,
            columns=columns,
        )

    def local_selection(self, selection: Selection) -> Selection:
        """Cut the lists of this member's queries out of a selection within the packed row."""
        row_Q = self.token_T if selection.by_token else self.own_block_N
        columns = selection.columns
        if columns is not None:
            columns = ColumnLists(
                tokens_NGK=columns.tokens_NGK.index_select(0, row_Q),
                counts_NG=columns.counts_NG.index_select(0, row_Q),
            )
        return self.selection(
            indices_QCK=selection.indices_QCK.index_select(0, row_Q),
            counts_QC=selection.counts_QC.index_select(0, row_Q),
            by_token=selection.by_token,
            columns=columns,
        )

    @cached_property
    def member_layouts(self) -> tuple[PackedLayout, ...]:
        """The blocks of every member's row."""
        return tuple(
            self.local_layout
            if member == self.member
            else _layout_of(self.owners, member, self.token_T.device)
            for member in range(self.members)
        )

    @cached_property
    def local_block_WX(self) -> Tensor:
        """int32 [W, X]: for every member and block of the packed row, the block's number in the
        member's row; -1 where the member does not hold it, and in the extra column."""
        owners = self.owners
        table_WX = np.full((self.members, len(owners.owner_N) + 1), -1, dtype=np.int64)
        for member in range(self.members):
            table_WX[member, owners.blocks_of(member)] = np.arange(owners.blocks_per_member[member])
        return self._on_device(table_WX.ravel()).view(table_WX.shape).int()

    @cached_property
    def local_token_WX(self) -> Tensor:
        """The same of tokens: int32, with one place for every token of the packed row and one."""
        owners = self.owners
        table_WX = np.full((self.members, owners.cu_seqlens[-1] + 1), -1, dtype=np.int32)
        for member, tokens in enumerate(owners.tokens_per_member):
            table_WX[member, owners.tokens_of(member)] = np.arange(tokens, dtype=np.int32)
        return self._on_device(table_WX.ravel()).view(table_WX.shape)

    @cached_property
    def slot_T(self) -> Tensor:
        """For every token of the packed row, its place where the members' rows lie one after the
        other, padded to the longest."""
        owners = self.owners
        longest = max(owners.tokens_per_member)
        slot_T = np.empty(owners.cu_seqlens[-1], dtype=np.int64)
        for member, tokens in enumerate(owners.tokens_per_member):
            slot_T[owners.tokens_of(member)] = member * longest + np.arange(tokens)
        return self._on_device(slot_T)

    @cached_property
    def slot_N(self) -> Tensor:
        """The same of every block of the packed row, where members' rows are lists of blocks."""
        owners = self.owners
        most = max(owners.blocks_per_member)
        slot_N = np.empty_like(owners.owner_N)
        for member, blocks in enumerate(owners.blocks_per_member):
            slot_N[owners.blocks_of(member)] = member * most + np.arange(blocks)
        return self._on_device(slot_N)

    def _on_device(self, x: np.ndarray) -> Tensor:
        return copied_to(torch.from_numpy(x), self.token_T.device)


def row_shard(owners: BlockOwners, member: int, device: torch.device | str) -> RowShard:
    """Build a member's share of a packed row.

    Everything is computed on the host and copied to ``device``, which is never read. What only some
    exchanges need is built when it is first asked for.

    Raises:
        ValueError: the group has no such member.
    """
    if not 0 <= member < owners.members:
        raise ValueError(f"member {member}: the context group has 0 to {owners.members - 1}")
    row_layout = packed_layout(owners.cu_seqlens, owners.block_size, device)
    whole = owners.members == 1
    index = {"token_T": owners.tokens_of(member), "own_block_N": owners.blocks_of(member)}
    return RowShard(
        owners=owners,
        member=member,
        row_layout=row_layout,
        local_layout=row_layout if whole else _layout_of(owners, member, device),
        **arrays_to(index, device),
    )


def _layout_of(owners: BlockOwners, member: int, device: torch.device | str) -> PackedLayout:
    return packed_layout(owners.cu_seqlens_of(member), owners.block_size, device)
