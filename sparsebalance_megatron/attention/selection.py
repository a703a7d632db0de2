# SPDX-License-Identifier: Apache-2.0
"""Lists of the KV blocks that every query reads: output of selectors, input of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout


def named(lists: Tensor, counts: Tensor, numbers: int) -> Tensor:
    """bool [..., numbers]: whether a list, of ``counts`` entries, names a number below
    ``numbers``; dimensions that ``counts`` has in front stay."""
    place_K = torch.arange(lists.shape[-1], device=lists.device)
    # What lies past a list's end lands in an extra column, which is cut off.
    lists = torch.where(place_K < counts[..., None], lists.long(), numbers)
    found = torch.zeros(*lists.shape[:-1], numbers + 1, dtype=torch.bool, device=lists.device)
    return found.scatter_(-1, lists, True)[..., :numbers]


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnLists:
    """Single tokens that blocks of queries read besides whole blocks of keys.

    Attributes:
        tokens_NGK: int32 numbers of tokens in the keys' sequence without repetition, one list for
            each query block and KV head. All lie in past blocks of the query block's document, so
            that every query of the block may read them, and in none that its list of blocks holds,
            so that no key is read twice. Undefined past the list's end.
        counts_NG: int32 lengths of the lists.
    """

    tokens_NGK: Tensor
    counts_NG: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Lists of KV blocks, one per selecting row and head.

    A listed block is read whole, but the query's own block up to the query itself. Queries and keys
    may lie in different packed sequences, where a rank holds some of either. Blocks of one training
    document keep their order in both and lie side by side; their documents need not be the training
    documents.

    Attributes:
        indices_QCK: int16 or int32 numbers of blocks in the keys' sequence without repetition, all
            of the query's training document. The own block, where it is listed, comes first, then
            past blocks in any order; undefined past the list's end.
        counts_QC: int32 lengths of the lists.
        by_token: whether tokens select (Q is T) or blocks of queries (Q is N). C is G, or H where
            every query head selects for itself.
        own_block_N: int64, for every query block the number in ``kv_layout`` of the block that it
            is itself; -1 where the keys' sequence does not hold it.
        columns: single tokens that are read besides, where blocks of queries select; or None.
    """

    indices_QCK: Tensor
    counts_QC: Tensor
    by_token: bool
    query_layout: PackedLayout
    kv_layout: PackedLayout
    own_block_N: Tensor
    columns: ColumnLists | None = None

    @classmethod
    def of_documents(
        cls, query_layout: PackedLayout, kv_layout: PackedLayout | None = None
    ) -> "Selection":
        """Whole documents, for :mod:`.kernels.dense`; it has no lists. ``kv_layout``: of the keys,
        where these are others."""
        device = query_layout.number_N.device
        return cls(
            indices_QCK=torch.empty(0, 0, 0, dtype=torch.int32, device=device),
            counts_QC=torch.empty(0, 0, dtype=torch.int32, device=device),
            by_token=True,
            query_layout=query_layout,
            kv_layout=kv_layout or query_layout,
            own_block_N=query_layout.number_N,
        )

    @classmethod
    def of_everything(cls, layouts: LayoutPair, kv_heads: int) -> "Selection":
        """Every block of queries reads all blocks of its document up to itself: dense attention."""
        own_N, kv_layout = layouts.own_block_N, layouts.kv_layout
        past_K = torch.arange(kv_layout.max_blocks, device=own_N.device)
        indices_NK = (own_N[:, None] - past_K).clamp_(min=0).int()
        counts_N = kv_layout.index_N[own_N].int() + 1
        return cls(
            indices_QCK=indices_NK[:, None].expand(-1, kv_heads, -1).contiguous(),
            counts_QC=counts_N[:, None].expand(-1, kv_heads).contiguous(),
            by_token=False,
            query_layout=layouts.query_layout,
            kv_layout=kv_layout,
            own_block_N=own_N,
        )

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Selection":
        """Other lists and own blocks in place of its own, as :meth:`tensors` gives them."""
        indices_QCK, counts_QC, own_block_N, *columns = tensors
        return replace(
            self,
            indices_QCK=indices_QCK,
            counts_QC=counts_QC,
            own_block_N=own_block_N,
            columns=ColumnLists(tokens_NGK=columns[0], counts_NG=columns[1]) if columns else None,
        )

    def of_head(self, head: int, heads: int) -> "Selection":
        """The lists of one of ``heads`` heads: of a KV head, or of each head that selects."""
        lists = self.counts_QC.shape[1] // heads
        some = slice(head * lists, (head + 1) * lists)
        return self.with_tensors([x[:, some] if x.ndim > 1 else x for x in self.tensors()])

    def without_first(self, rows: int) -> "Selection":
        """The selection with empty lists for the first rows, blocks or tokens as they select."""
        # Lengths of lists have two dimensions, nothing else has.
        tensors = [x.clone() if x.ndim == 2 else x for x in self.tensors()]
        for counts in (x for x in tensors if x.ndim == 2):
            counts[:rows] = 0
        return self.with_tensors(tensors)

    def tensors(self) -> tuple[Tensor, ...]:
        """Its lists and own blocks as plain tensors."""
        lists = self.indices_QCK, self.counts_QC, self.own_block_N
        if self.columns is None:
            return lists
        return *lists, self.columns.tokens_NGK, self.columns.counts_NG

    @property
    def selecting_rows(self) -> int:
        """Q: tokens or blocks of the queries' sequence."""
        return self.query_layout.tokens if self.by_token else self.query_layout.blocks
