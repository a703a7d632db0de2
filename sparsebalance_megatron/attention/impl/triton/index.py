# SPDX-License-Identifier: Apache-2.0
"""From "which KV blocks a query block reads" to "which query blocks read a KV block".

Built on the device by a stable sort and binary searches: no atomics, so the order of every list is
the same each time, and no buffer depends on a value of the device, so the host never waits.

Shape legend: N blocks of the row, G KV heads, K width of the selection's lists, L inverse lists
(G * N in all; list g * N + n is KV block n of KV head g), E capacity for entries (N * G * K),
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
        offsets_L: L + 1 bounds of the lists in ``queries_E``.
        queries_E: query blocks by rising number in each list; undefined past the last bound.
        order_L: lists by falling length.
        parts_L: items of each list, in that order; at least 1.
        first_item_L: first item of each list, in that order.
        item_list_I: an item's list; -1 past the last item.
        item_part_I: an item's place in its list.
        item_parts_I: how many items its list was cut into.
        entries_per_item: see above.
        cut_lists, cut_items: how many lists and items of cut lists there can be at most.
    """

    offsets_L: Tensor
    queries_E: Tensor
    order_L: Tensor
    parts_L: Tensor
    first_item_L: Tensor
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
    offsets_L, queries_E = _invert(selection)
    blocks, heads, width = selection.indices_RCK.shape
    capacity = heads * _entries(selection)
    entries_per_item = max(1, min(4 * width, -(-capacity // wanted_items)))
    longest = selection.layout.max_blocks
    cut_lists = capacity // (entries_per_item + 1) if longest > entries_per_item else 0
    # A cut list of n entries has at most n / entries_per_item + 1 items, less than twice that.
    cut_items = min(capacity // entries_per_item + cut_lists, 2 * capacity // entries_per_item)
    items = heads * blocks + (capacity // entries_per_item if cut_lists else 0)

    lengths_L = offsets_L[1:] - offsets_L[:-1]
    order_L = lengths_L.argsort(descending=True, stable=True)
    parts_L = (lengths_L[order_L] + (entries_per_item - 1)).div(
        entries_per_item, rounding_mode="floor"
    )
    parts_L = parts_L.clamp(min=1)
    end_L = parts_L.cumsum(0)
    item_I = torch.arange(items, device=end_L.device)
    place_I = torch.searchsorted(end_L, item_I, right=True)
    exists_I = place_I < end_L.shape[0]
    place_I = place_I.clamp(max=end_L.shape[0] - 1)
    first_item_L = end_L - parts_L
    return InverseLists(
        offsets_L=offsets_L,
        queries_E=queries_E,
        order_L=order_L.int(),
        parts_L=parts_L.int(),
        first_item_L=first_item_L.int(),
        item_list_I=order_L[place_I].masked_fill(~exists_I, -1).int(),
        item_part_I=(item_I - first_item_L[place_I]).int(),
        item_parts_I=parts_L[place_I].int(),
        entries_per_item=entries_per_item,
        cut_lists=cut_lists,
        cut_items=cut_items if cut_lists else 0,
    )


def _invert(selection: Selection) -> tuple[Tensor, Tensor]:
    """(offsets_L, queries_E): a stable sort of all entries by (KV head, KV block)."""
    indices_NGK, counts_NG = selection.indices_RCK, selection.counts_RC
    blocks, heads, width = indices_NGK.shape
    device = indices_NGK.device
    present_NGK = torch.arange(width, device=device) < counts_NG[:, :, None]
    first_list_G1 = torch.arange(0, heads * blocks, blocks, device=device, dtype=torch.int32)
    key_NGK = (indices_NGK + first_list_G1[:, None]).masked_fill(~present_NGK, heads * blocks)
    # Query blocks rise along the flattened order, and a stable sort keeps that.
    key_E, source_E = key_NGK.transpose(0, 1).reshape(-1).sort(stable=True)
    queries_E = source_E.div(width, rounding_mode="floor").remainder(blocks).int()
    lists = torch.arange(heads * blocks + 1, device=device, dtype=key_E.dtype)
    return torch.searchsorted(key_E, lists, out_int32=True), queries_E


def _entries(selection: Selection) -> int:
    """Most entries that one head's lists can hold: none reads a later block."""
    width = selection.indices_RCK.shape[2]
    total = 0
    for blocks in selection.layout.blocks_per_document:
        growing = min(blocks, width)
        total += growing * (growing + 1) // 2 + (blocks - growing) * width
    return total
