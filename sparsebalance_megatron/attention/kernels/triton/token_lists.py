# SPDX-License-Identifier: Apache-2.0
"""The work of one selecting head whose tokens choose for themselves: its lists, cut into chunks.

Partial results of a chunk of tokens lie in one buffer of bounded size, which the next chunk uses
again. In a chunk, the tokens that chose a KV block are cut into items of a few tiles.

Shape legend: T tokens of the packed row, K places of a list, W chunks, I capacity for items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.index import SortedEntries, sorted_entries
from sparsebalance_megatron.attention.selection import Selection

_PARTIAL_BYTES = 256 << 20
"""Most bytes of a chunk's partial results, unless those of a single token are more."""
TILES_PER_ITEM = 8
"""Over these tiles of queries a program keeps its keys and values, which take as long to fetch as
the queries of four tiles."""


@dataclass(frozen=True, kw_only=True)
class HeadSlice:
    """Query heads that are computed together: some or all of those that share a list.

    Attributes:
        selecting_head: whose lists they read.
        kv_head: whose keys and values they read.
        first: number of the first of them.
        heads: how many they are.
    """

    selecting_head: int
    kv_head: int
    first: int
    heads: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedLists:
    """One selecting head's lists and the items of every chunk. Tensors are int32.

    Attributes:
        entries: the lists, inverted.
        chunk_tokens: tokens of every chunk but the last, which may have fewer.
        entries_per_item: an item is up to as many entries of one list that lie in one chunk.
        item_list_WI: an item's KV block; -1 past the chunk's last item.
        item_part_WI: an item's place in its list and chunk.
    """

    entries: SortedEntries
    chunk_tokens: int
    entries_per_item: int
    item_list_WI: Tensor
    item_part_WI: Tensor

    @property
    def items(self) -> int:
        """I: how many items a chunk can have at most."""
        return self.item_list_WI.shape[1]


def head_slices(
    selection: Selection, query_heads: int, kv_heads: int, most: int
) -> Iterator[list[HeadSlice]]:
    """The slices of every selecting head, of at most ``most`` query heads, all of one size."""
    selecting_heads = selection.counts_QC.shape[1]
    shared = query_heads // selecting_heads
    heads = max(n for n in range(1, min(shared, most) + 1) if shared % n == 0)
    for head in range(selecting_heads):
        yield [
            HeadSlice(
                selecting_head=head,
                kv_head=head * kv_heads // selecting_heads,
                first=first,
                heads=heads,
            )
            for first in range(head * shared, (head + 1) * shared, heads)
        ]


def chunked_lists(selection: Selection, *, entry_bytes: int, entries_per_tile: int) -> ChunkedLists:
    """Invert the lists of a single selecting head and cut them.

    Args:
        selection: by token, of one head.
        entry_bytes: what the partial results of one entry of a list take.
        entries_per_tile: entries whose queries a tile holds.
    """
    tokens, _, width = selection.indices_QCK.shape
    fitting = max(1, _PARTIAL_BYTES // (entry_bytes * width))
    chunks = -(-tokens // fitting)
    chunk_tokens = -(-tokens // chunks)
    entries = sorted_entries(selection, chunk_rows=chunk_tokens)
    entries_per_item = TILES_PER_ITEM * entries_per_tile
    blocks, chunks = selection.kv_layout.blocks, entries.chunks
    parts_WU = (
        (entries.bounds_J.diff() + (entries_per_item - 1))
        .div(entries_per_item, rounding_mode="floor")
        .view(blocks, chunks)
        .t()
    )
    end_WU = parts_WU.cumsum(1)
    items = chunk_tokens * width // entries_per_item + blocks
    item_WI = torch.arange(items, device=end_WU.device).expand(chunks, items).contiguous()
    list_WI = torch.searchsorted(end_WU, item_WI, right=True)
    missing_WI = list_WI == blocks
    list_WI.clamp_(max=blocks - 1)
    first_item_WU = end_WU - parts_WU
    return ChunkedLists(
        entries=entries,
        chunk_tokens=chunk_tokens,
        entries_per_item=entries_per_item,
        item_list_WI=list_WI.masked_fill(missing_WI, -1).int(),
        item_part_WI=(item_WI - first_item_WU.gather(1, list_WI)).int(),
    )
