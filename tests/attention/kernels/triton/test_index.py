# SPDX-License-Identifier: Apache-2.0
"""Readers of every KV block, and the items their lists are cut into, against loops."""

import itertools

import numpy as np
import pytest
import torch
from attention.cases import drawn, listed, lists_within, on_device, ranked
from attention.kernels.triton.where import DEVICE, pytestmark  # noqa: F401
from attention.sequence.slices import local_selection, slices_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.attention.kernels.triton import index
from sparsebalance_megatron.attention.kernels.triton.index import inverse_lists, readers_of
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.selection import Selection

PLENTY = 1 << 20


@st.composite
def _selections(draw: st.DrawFn) -> Selection:
    """Random lists; where drawn, every query block also reads its document's first block."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    budgets = draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    layout = packed_layout([0, *itertools.accumulate(lengths)], 4, "cpu")
    kv_heads, seed = draw(st.integers(1, 3)), draw(st.integers(0, 1000))
    selector = selector_named("previous-block", first_blocks=draw(st.integers(0, 1)))
    qk = drawn(layout.tokens, kv_heads, kv_heads, seed=seed)
    ranking = ranked(selector, qk, layout, max_budget=max(budgets))
    return selector.select(ranking, torch.tensor(budgets))


def _expected(selection: Selection, kv_heads: int) -> list[list[int]]:
    """Readers of every list: a row, then a head of those that read the KV head."""
    shared, blocks = selection.counts_QC.shape[1] // kv_heads, selection.kv_layout.blocks
    readers: list[list[int]] = [[] for _ in range(kv_heads * blocks)]
    for (row, head), numbers in listed(selection.indices_QCK, selection.counts_QC).items():
        for number in numbers:
            readers[head // shared * blocks + number].append(row * shared + head % shared)
    return readers


@given(_selections(), st.sampled_from([1, 3, 20, 1000]), st.integers(0, 2))
@settings(max_examples=8)
def test_lists_and_items_are_as_defined(
    selection: Selection, wanted_items: int, member: int
) -> None:
    """Where drawn, a member of a context group asks."""
    blocks, layout = selection.kv_layout.blocks, selection.kv_layout
    if member and blocks > 1:
        slices = slices_of(layout.cu_seqlens, np.arange(blocks) % 2, 2, layout.block_size)
        held = slices[member % 2]
        selection = local_selection(selection, held)
    kv_heads = selection.counts_QC.shape[1]
    lists = inverse_lists(
        on_device(selection, DEVICE), kv_heads, wanted_items=wanted_items, most_cut_items=PLENTY
    )
    expected = _expected(selection, kv_heads)
    bounds = lists.entries.bounds_J[:: lists.entries.tiles].tolist()
    assert [
        lists.entries.readers_E[a:b].tolist() for a, b in itertools.pairwise(bounds)
    ] == expected

    most = lists.entries_per_item
    assert 1 <= most <= 4 * selection.indices_QCK.shape[2]
    parts = [max(1, -(-len(readers) // most)) for readers in expected]
    counts, first_places = lists.list_2U.tolist()
    assert counts[: len(parts)] == parts
    assert sum(count for count in parts if count > 1) <= lists.cut_items
    item_lists, item_parts, item_places = lists.item_3I.tolist()
    items = list(zip(item_lists, item_parts, strict=True))
    existing = [item for item in items if item[0] >= 0]
    assert items[: len(existing)] == existing
    assert sorted(existing) == [(u, part) for u, n in enumerate(parts) for part in range(n)]
    # The second pass finds a cut list's results side by side.
    places = item_places[: len(existing)]
    cut = [place for place in places if place >= 0]
    assert sorted(cut) == list(range(len(cut)))
    for (number, part), place in zip(existing, places, strict=True):
        assert place == (first_places[number] + part if parts[number] > 1 else -1)


def test_a_block_that_all_read_is_cut_as_memory_allows() -> None:
    layout = packed_layout([0, 4 * 200], 4, DEVICE)
    own_N = torch.arange(200, dtype=torch.int32, device=DEVICE)
    indices_NGK = torch.stack([own_N, torch.zeros_like(own_N)], dim=1)[:, None]
    counts_NG = torch.full((200, 1), 2, dtype=torch.int32, device=DEVICE)
    indices_NGK[0, 0, 1], counts_NG[0] = -1, 1
    selection = lists_within(layout, indices_NGK, counts_NG, by_token=False)
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
    selection = lists_within(layout, indices_TCK.to(DEVICE), counts_TC.to(DEVICE), by_token=True)
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
