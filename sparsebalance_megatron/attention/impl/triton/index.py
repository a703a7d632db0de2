# SPDX-License-Identifier: Apache-2.0
"""From "which KV blocks a query block reads" to "which query blocks read a KV block".

Built on the device by a stable sort and binary searches: no atomics, so the order of every list is
the same each time, and no buffer depends on a value of the device, so the host never waits.

Shape legend: N blocks of the queries' row, G KV heads, K places of a list, U inverse lists (one per
KV head and KV block, all KV blocks of a head side by side), E capacity for entries (N * G * K),
I capacity for items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class InverseLists:
    """Readers of every KV block in CSR form, and the items of work they are cut into.

    An item is up to ``entries_per_item`` consecutive entries of one list. Items lie by falling
    length of their list, so the longest start first and the items of cut lists precede all others.
    Tensors are int32.

    Attributes:
        offsets_U: U + 1 bounds of the lists in ``queries_E``.
        queries_E: query blocks by rising number in each list; undefined past the last bound.
        order_U: lists by falling length.
        parts_U: items of each list, in that order; at least 1.
        first_item_U: first item of each list, in that order.
        item_list_I: an item's list; -1 past the last item.
        item_part_I: an item's place in its list.
        item_parts_I: how many items its list was cut into.
        entries_per_item: see above.
        cut_lists, cut_items: how many lists and items of cut lists there can be at most.
    """

    offsets_U: Tensor
    queries_E: Tensor
    order_U: Tensor
    parts_U: Tensor
    first_item_U: Tensor
    item_list_I: Tensor
    item_part_I: Tensor
    item_parts_I: Tensor
    entries_per_item: int
    cut_lists: int
    cut_items: int

    @property
    def items(self) -> int:
        """I: how many items there can be at most."""
        return self.item_list_I.shape[0]


def inverse_lists(selection: Selection, *, wanted_items: int) -> InverseLists:
    """Invert a query-block selection.

    Lists are cut into about ``wanted_items`` items to fill the device, and in any case at four
    times the width of the selection's lists, so that a block that every query reads does not keep
    one program busy long after all others have ended.
    """
    offsets_U, queries_E = _invert(selection)
    _, heads, width = selection.indices_QCK.shape
    blocks = selection.kv_layout.blocks
    capacity = heads * _entries(selection)
    entries_per_item = max(1, min(4 * width, -(-capacity // wanted_items)))
    cut_lists = capacity // (entries_per_item + 1)
    if _longest(selection) <= entries_per_item:
        cut_lists = 0
    # A cut list of n entries has at most n / entries_per_item + 1 items, less than twice that.
    cut_items = min(capacity // entries_per_item + cut_lists, 2 * capacity // entries_per_item)
    items = heads * blocks + (capacity // entries_per_item if cut_lists else 0)

    lengths_U = offsets_U[1:] - offsets_U[:-1]
    order_U = lengths_U.argsort(descending=True, stable=True)
    parts_U = (lengths_U[order_U] + (entries_per_item - 1)).div(
        entries_per_item, rounding_mode="floor"
    )
    parts_U = parts_U.clamp(min=1)
    end_U = parts_U.cumsum(0)
    item_I = torch.arange(items, device=end_U.device)
    place_I = torch.searchsorted(end_U, item_I, right=True)
    exists_I = place_I < end_U.shape[0]
    place_I = place_I.clamp(max=end_U.shape[0] - 1)
    first_item_U = end_U - parts_U
    return InverseLists(
        offsets_U=offsets_U,
        queries_E=queries_E,
        order_U=order_U.int(),
        parts_U=parts_U.int(),
        first_item_U=first_item_U.int(),
        item_list_I=order_U[place_I].masked_fill(~exists_I, -1).int(),
        item_part_I=(item_I - first_item_U[place_I]).int(),
        item_parts_I=parts_U[place_I].int(),
        entries_per_item=entries_per_item,
        cut_lists=cut_lists,
        cut_items=cut_items if cut_lists else 0,
    )


def _invert(selection: Selection) -> tuple[Tensor, Tensor]:
    """(offsets_U, queries_E): a stable sort of all entries by (KV head, KV block)."""
    indices_NGK, counts_NG = selection.indices_QCK, selection.counts_QC
    query_blocks, heads, width = indices_NGK.shape
    blocks = selection.kv_layout.blocks
    device = indices_NGK.device
    present_NGK = torch.arange(width, device=device) < counts_NG[:, :, None]
    first_list_G1 = torch.arange(0, heads * blocks, blocks, device=device, dtype=torch.int32)
    key_NGK = (indices_NGK + first_list_G1[:, None]).masked_fill(~present_NGK, heads * blocks)
    # Query blocks rise along the flattened order, and a stable sort keeps that.
    key_E, source_E = key_NGK.transpose(0, 1).reshape(-1).sort(stable=True)
    queries_E = source_E.div(width, rounding_mode="floor").remainder(query_blocks).int()
    lists = torch.arange(heads * blocks + 1, device=device, dtype=key_E.dtype)
    return torch.searchsorted(key_E, lists, out_int32=True), queries_E


def _longest(selection: Selection) -> int:
    """Most readers that a KV block can have."""
    layout = selection.query_layout
    return layout.max_blocks if layout is selection.kv_layout else layout.blocks


def _entries(selection: Selection) -> int:
    """Most entries that one head's lists can hold; in one row, none reads a later block."""
    width = selection.indices_QCK.shape[2]
    if selection.query_layout is not selection.kv_layout:
        return selection.query_layout.blocks * min(width, selection.kv_layout.blocks)
    total = 0
    for blocks in selection.kv_layout.blocks_per_document:
        growing = min(blocks, width)
        total += growing * (growing + 1) // 2 + (blocks - growing) * width
    return total
