# SPDX-License-Identifier: Apache-2.0
"""Readers of every KV block against loops, and how far their lists are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention.cases import listed
from attention.triton.where import DEVICE, pytestmark  # noqa: F401

from sparsebalance_megatron.attention.kernels.triton import index
from sparsebalance_megatron.attention.kernels.triton.index import (
    inverse_lists,
    readers_of,
)
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection

PLENTY = 1 << 20


def _expected(selection: Selection, kv_heads: int) -> list[list[int]]:
    """Readers of every list: a row, then a head of those that read the KV head."""
    shared, blocks = selection.counts_QC.shape[1] // kv_heads, selection.kv_layout.blocks
    readers: list[list[int]] = [[] for _ in range(kv_heads * blocks)]
    for (row, head), numbers in listed(selection.indices_QCK, selection.counts_QC).items():
        for number in numbers:
            readers[head // shared * blocks + number].append(row * shared + head % shared)
    return readers


def test_a_block_that_all_read_is_cut_as_memory_allows() -> None:
    layout = packed_layout([0, 4 * 200], 4, DEVICE)
    own_N = torch.arange(200, dtype=torch.int32, device=DEVICE)
    indices_NGK = torch.stack([own_N, torch.zeros_like(own_N)], dim=1)[:, None]
    counts_NG = torch.full((200, 1), 2, dtype=torch.int32, device=DEVICE)
    indices_NGK[0, 0, 1], counts_NG[0] = -1, 1
    selection = Selection.within(
        layout, indices_QCK=indices_NGK, counts_QC=counts_NG, by_token=False
    )
    for most_cut_items, entries_per_item in ((PLENTY, 8), (20, 40)):
        lists = inverse_lists(selection, 1, wanted_items=1, most_cut_items=most_cut_items)
        assert lists.entries_per_item == entries_per_item
        assert lists.item_3I[0].tolist().count(0) == 200 // entries_per_item
        assert lists.cut_items <= most_cut_items or most_cut_items == PLENTY


@pytest.mark.parametrize("most_bounds", [1, 1 << 25])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 1), (2, 2, 3), (4, 2, 40)])
def test_readers_lie_by_block_and_tile(
    heads: int, kv_heads: int, width: int, most_bounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens with lists of their own, by KV head or by query head; more places than lanes."""
    monkeypatch.setattr(index, "FEWEST_TILE_READERS", 8)
    monkeypatch.setattr(index, "MOST_BOUNDS", most_bounds)
    layout = packed_layout([0, 1, 30, 30 + 2 * width], 2, DEVICE)
    generator = torch.Generator().manual_seed(heads)
    indices_TCK = torch.full((layout.tokens, heads, width), -1, dtype=torch.int16)
    counts_TC = torch.zeros(layout.tokens, heads, dtype=torch.int32)
    for token, block in enumerate(layout.block_T.tolist()):
        visible = int(layout.index_N[block]) + 1
        for head in range(heads):
            count = int(torch.randint(0, min(visible, width) + 1, (1,), generator=generator))
            chosen = block - torch.randperm(visible, generator=generator)[:count]
            indices_TCK[token, head, :count], counts_TC[token, head] = chosen.short(), count
    selection = Selection.within(
        layout, indices_QCK=indices_TCK.to(DEVICE), counts_QC=counts_TC.to(DEVICE), by_token=True
    )
    entries = readers_of(selection, kv_heads)
    bounds = entries.bounds_J.tolist()
    assert len(bounds) == kv_heads * layout.blocks * entries.tiles + 1
    assert (entries.tiles > 1) == (most_bounds > 1)
    expected = _expected(selection, kv_heads)
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        u, tile = divmod(number, entries.tiles)
        first = tile * entries.tile_readers
        inside = [x for x in expected[u] if first <= x < first + entries.tile_readers]
        assert entries.readers_E[begin:end].tolist() == inside
