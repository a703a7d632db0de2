# SPDX-License-Identifier: Apache-2.0
"""From "which KV blocks a query block or token reads" to "what reads a KV block".

Built on the device by a stable sort and binary searches: no atomics, so the order of every list is
the same each time, and no buffer depends on a value of the device, so the host never waits.

Shape legend: Q rows and C heads that select, K places of a list, U inverse lists (one per selecting
head and KV block, all KV blocks of a head side by side), E capacity for entries (Q * C * K), J
bounds of chunks, F groups of lists, O lists of a group, I capacity for a group's items.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedEntries:
    """Readers of every KV block in CSR form. Tensors are int32.

    Attributes:
        queries_E: what reads, by rising number in each list; undefined past the last bound. Query
            blocks, or tokens: then ``token << place_bits | place``, the place in the token's list.
        place_bits: see above; 0 for query blocks.
        bounds_J: the chunks' first entries, list by list, and the end of the last: U * chunks + 1.
        chunks: runs of consecutive selecting rows; the entries of one lie side by side in a list.
    """

    queries_E: Tensor
    place_bits: int
    bounds_J: Tensor
    chunks: int

    @property
    def offsets_U(self) -> Tensor:
        """U + 1 bounds of the lists in ``queries_E``."""
        return self.bounds_J[:: self.chunks].contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class InverseLists:
    """Readers of every KV block, and the items of work that their lists are cut into.

    Lists lie in groups: all of one, or those of every selecting head apart. An item is up to
    ``entries_per_item`` consecutive entries of one list. A group's items lie by falling length of
    their list, so the longest start first and the items of cut lists precede all others. Tensors
    are int32, and number lists and items inside their group.

    Attributes:
        entries: the readers.
        order_FO: lists by falling length.
        parts_FO: items of each list, in that order; at least 1.
        first_item_FO: first item of each list, in that order.
        item_list_FI: an item's list; -1 past the last item.
        item_part_FI: an item's place in its list.
        item_parts_FI: how many items its list was cut into.
        entries_per_item: see above.
        cut_lists, cut_items: how many lists and items of cut lists a group can have at most.
    """

    entries: SortedEntries
    order_FO: Tensor
    parts_FO: Tensor
    first_item_FO: Tensor
    item_list_FI: Tensor
    item_part_FI: Tensor
    item_parts_FI: Tensor
    entries_per_item: int
    cut_lists: int
    cut_items: int


def inverse_lists(
    selection: Selection,
    *,
    wanted_items: int,
    entries: SortedEntries | None = None,
    groups: int = 1,
) -> InverseLists:
    """Invert a selection.

    Lists are cut into about ``wanted_items`` items to fill the device, and in any case at four
    times the length that a full block's list has on average, so that a block that every query reads
    does not keep one program busy long after all others have ended.

    Args:
        selection: by query block or by token.
        wanted_items: of a group.
        entries: the selection's entries, where they have been sorted before.
        groups: 1, or the selecting heads.
    """
    entries = entries or sorted_entries(selection)
    _, heads, width = selection.indices_QCK.shape
    lists = heads // groups * selection.kv_layout.blocks
    capacity = heads // groups * _entries(selection)
    # A short block has no readers but its own, so that its list is never cut.
    own_readers = selection.query_layout.block_size if selection.by_token else 1
    entries_per_item = min(4 * width * own_readers, -(-capacity // wanted_items))
    entries_per_item = max(own_readers, entries_per_item)
    cut_lists = capacity // (entries_per_item + 1)
    if _longest(selection) <= entries_per_item:
        cut_lists = 0
    # A cut list of n entries has at most n / entries_per_item + 1 items, less than twice that.
    cut_items = min(capacity // entries_per_item + cut_lists, 2 * capacity // entries_per_item)
    items = lists + (capacity // entries_per_item if cut_lists else 0)

    lengths_FO = entries.offsets_U.diff().view(groups, lists)
    order_FO = lengths_FO.argsort(dim=1, descending=True, stable=True)
    table = item_table(lengths_FO.gather(1, order_FO), items, entries_per_item, least=1)
    list_FI = order_FO.gather(1, table.list_FI)
    return InverseLists(
        entries=entries,
        order_FO=order_FO.int(),
        parts_FO=table.parts_FO.int(),
        first_item_FO=table.first_item_FO.int(),
        item_list_FI=list_FI.masked_fill_(table.missing_FI, -1).int(),
        item_part_FI=table.part_FI.int(),
        item_parts_FI=table.parts_FO.gather(1, table.list_FI).int(),
        entries_per_item=entries_per_item,
        cut_lists=min(cut_lists, lists),
        cut_items=cut_items if cut_lists else 0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemTable:
    """Lists cut into items, one group of lists beside the other.

    Attributes:
        parts_FO: items of each list.
        first_item_FO: each list's first item.
        list_FI: an item's list; the last one past the last item.
        part_FI: an item's place in its list.
        missing_FI: whether the group has no such item.
    """

    parts_FO: Tensor
    first_item_FO: Tensor
    list_FI: Tensor
    part_FI: Tensor
    missing_FI: Tensor


def item_table(
    lengths_FO: Tensor, items: int, entries_per_item: int, *, least: int = 0
) -> ItemTable:
    """Cut lists into items of ``entries_per_item`` entries or fewer, at least ``least`` a list."""
    groups, lists = lengths_FO.shape
    parts_FO = (lengths_FO + (entries_per_item - 1)).div(entries_per_item, rounding_mode="floor")
    if least:
        parts_FO = parts_FO.clamp_(min=least)
    end_FO = parts_FO.cumsum(1)
    item_FI = torch.arange(items, device=end_FO.device).expand(groups, items).contiguous()
    list_FI = torch.searchsorted(end_FO, item_FI, right=True)
    missing_FI = list_FI == lists
    list_FI.clamp_(max=lists - 1)
    first_item_FO = end_FO - parts_FO
    return ItemTable(
        parts_FO=parts_FO,
        first_item_FO=first_item_FO,
        list_FI=list_FI,
        part_FI=item_FI - first_item_FO.gather(1, list_FI),
        missing_FI=missing_FI,
    )


def sorted_entries(selection: Selection, *, chunk_rows: int | None = None) -> SortedEntries:
    """All entries of a selection by (selecting head, KV block), readers rising.

    Args:
        selection: by query block or by token.
        chunk_rows: selecting rows of a chunk; default: all, in one.
    """
    indices_QCK, counts_QC = selection.indices_QCK, selection.counts_QC
    rows, heads, width = indices_QCK.shape
    chunk_rows = chunk_rows or rows
    chunks = -(-rows // chunk_rows)
    blocks, device = selection.kv_layout.blocks, indices_QCK.device
    present_QCK = torch.arange(width, device=device) < counts_QC[:, :, None]
    first_list_C1 = torch.arange(0, heads * blocks, blocks, device=device, dtype=torch.int32)
    key_QCK = indices_QCK + first_list_C1[:, None]
    if chunks > 1:
        chunk_Q = torch.arange(rows, device=device, dtype=torch.int32).div(
            chunk_rows, rounding_mode="floor"
        )
        key_QCK.mul_(chunks).add_(chunk_Q[:, None, None])
    bounds = heads * blocks * chunks
    key_QCK.masked_fill_(~present_QCK, bounds)
    # Rows, hence their chunks, rise along the flattened order, and a stable sort keeps that.
    key_E, source_E = key_QCK.transpose(0, 1).reshape(-1).sort(stable=True)
    place_bits = (width - 1).bit_length() if selection.by_token else 0
    row_E = source_E.div(width, rounding_mode="floor").remainder_(rows)
    if selection.by_token:
        row_E = row_E.bitwise_left_shift_(place_bits).bitwise_or_(source_E.remainder_(width))
    numbers_J = torch.arange(bounds + 1, device=device, dtype=key_E.dtype)
    return SortedEntries(
        queries_E=row_E.int(),
        place_bits=place_bits,
        bounds_J=torch.searchsorted(key_E, numbers_J, out_int32=True),
        chunks=chunks,
    )


def _longest(selection: Selection) -> int:
    """Most readers that a KV block can have."""
    layout = selection.query_layout
    if layout is not selection.kv_layout:
        return selection.selecting_rows
    return max(_document_tokens(layout)) if selection.by_token else layout.max_blocks


def _entries(selection: Selection) -> int:
    """Most entries that one head's lists can hold; in one sequence, none reads a later block."""
    width, layout = selection.indices_QCK.shape[2], selection.query_layout
    if layout is not selection.kv_layout:
        return selection.selecting_rows * min(width, selection.kv_layout.blocks)
    size = layout.block_size if selection.by_token else 1
    total = 0
    for blocks, tokens in zip(layout.blocks_per_document, _document_tokens(layout), strict=True):
        growing = min(blocks, width)
        total += (growing * (growing + 1) // 2 + (blocks - growing) * width) * size
        if selection.by_token:
            total -= (blocks * size - tokens) * growing
    return total


def _document_tokens(layout: PackedLayout) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(layout.cu_seqlens)]
