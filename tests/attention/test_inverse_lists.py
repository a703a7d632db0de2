# SPDX-License-Identifier: Apache-2.0
"""Readers of every KV block, and the items their lists are cut into."""

from __future__ import annotations

import itertools

import torch
from attention.cases import selection_by_scores, sharded
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.attention.kernels.triton.index import (
    InverseLists,
    inverse_lists,
    sorted_entries,
)
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection


@st.composite
def _selections(draw: st.DrawFn) -> Selection:
    """Random lists; where drawn, every query block also reads its document's first block."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    budgets = draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    kv_heads, popular = draw(st.integers(1, 3)), draw(st.booleans())
    layout = packed_layout([0, *itertools.accumulate(lengths)], 4, "cpu")
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scores = torch.randn(layout.blocks, kv_heads, layout.max_blocks, generator=generator)
    if popular:
        scores[:, :, 0] = 100.0
    return selection_by_scores(scores, layout, budgets)


def _readers(selection: Selection) -> list[list[int]]:
    query_blocks, heads, _ = selection.indices_QCK.shape
    blocks = selection.kv_layout.blocks
    readers: list[list[int]] = [[] for _ in range(heads * blocks)]
    for head in range(heads):
        for query_block in range(query_blocks):
            count = int(selection.counts_QC[query_block, head])
            for number in selection.indices_QCK[query_block, head, :count].tolist():
                readers[head * blocks + number].append(query_block)
    return readers


def _items(lists: InverseLists) -> list[tuple[int, int, int]]:
    fields = lists.item_list_FI, lists.item_part_FI, lists.item_parts_FI
    return list(zip(*(field[0].tolist() for field in fields), strict=True))


@given(_selections(), st.sampled_from([1, 3, 20, 1000]), st.integers(0, 3))
@settings(max_examples=60)
def test_lists_and_items_are_as_defined(
    selection: Selection, wanted_items: int, other_rows: int
) -> None:
    """Where drawn, the sequence of the queries or of the keys holds every other block only."""
    blocks = range(selection.kv_layout.blocks)
    if other_rows:
        query_blocks = blocks[:: 1 + other_rows % 2]
        selection = sharded(selection, query_blocks, blocks[:: 1 + other_rows // 2])
    lists = inverse_lists(selection, wanted_items=wanted_items)
    expected = _readers(selection)
    offsets = lists.entries.offsets_U.tolist()
    found = [lists.entries.queries_E[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert found == expected

    most = lists.entries_per_item
    assert 1 <= most <= 4 * selection.indices_QCK.shape[2]
    parts = [max(1, -(-len(readers) // most)) for readers in expected]
    items = _items(lists)
    existing = [item for item in items if item[0] >= 0]
    assert items[: len(existing)] == existing
    assert sorted(existing) == sorted(
        (number, part, count) for number, count in enumerate(parts) for part in range(count)
    )
    lengths = [len(expected[number]) for number, _, _ in existing]
    assert lengths == sorted(lengths, reverse=True)

    # The second pass finds a cut list's items side by side, inside the buffers' capacity.
    cut = sum(count > 1 for count in parts)
    assert cut <= lists.cut_lists
    assert sum(count for count in parts if count > 1) <= lists.cut_items
    for place in range(cut):
        number, first = int(lists.order_FO[0, place]), int(lists.first_item_FO[0, place])
        assert int(lists.parts_FO[0, place]) == parts[number]
        taken = items[first : first + parts[number]]
        assert taken == [(number, part, parts[number]) for part in range(parts[number])]


def test_a_block_that_all_read_is_cut() -> None:
    layout = packed_layout([0, 4 * 200], 4, "cpu")
    own_N = torch.arange(200, dtype=torch.int32)
    indices_NGK = torch.stack([own_N, torch.zeros_like(own_N)], dim=1)[:, None]
    counts_NG = torch.full((200, 1), 2, dtype=torch.int32)
    indices_NGK[0, 0, 1], counts_NG[0] = -1, 1
    selection = Selection.within(
        layout, indices_QCK=indices_NGK, counts_QC=counts_NG, by_token=False
    )
    lists = inverse_lists(selection, wanted_items=1)
    assert lists.entries_per_item == 8
    assert _items(lists)[:25] == [(0, part, 25) for part in range(25)]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_entries_of_tokens_lie_by_block_and_chunk(
    lengths: list[int], width: int, chunk_tokens: int, seed: int
) -> None:
    """Against loops: tokens in rising order, each with the block's place in its list."""
    layout = packed_layout([0, *itertools.accumulate(lengths)], 4, "cpu")
    generator = torch.Generator().manual_seed(seed)
    indices_TCK = torch.full((layout.tokens, 1, width), -1, dtype=torch.int32)
    counts_TC = torch.zeros(layout.tokens, 1, dtype=torch.int32)
    for token, block in enumerate(layout.block_T.tolist()):
        visible = int(layout.index_N[block]) + 1
        count = int(torch.randint(0, min(visible, width) + 1, (1,), generator=generator))
        chosen = block - torch.randperm(visible, generator=generator)[:count]
        indices_TCK[token, 0, :count], counts_TC[token] = chosen.int(), count
    entries = sorted_entries(
        Selection.within(layout, indices_QCK=indices_TCK, counts_QC=counts_TC, by_token=True),
        chunk_rows=chunk_tokens,
    )
    chunks = -(-layout.tokens // chunk_tokens)
    assert entries.chunks == chunks
    bounds = entries.bounds_J.tolist()
    assert entries.offsets_U.tolist() == bounds[::chunks]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        block, chunk = divmod(number, chunks)
        tokens = range(chunk * chunk_tokens, min(layout.tokens, (chunk + 1) * chunk_tokens))
        expected = []
        for token in tokens:
            listed = indices_TCK[token, 0, : int(counts_TC[token])].tolist()
            expected += [(token, listed.index(block))] if block in listed else []
        found = entries.queries_E[begin:end]
        places = found & ((1 << entries.place_bits) - 1)
        assert (
            list(zip((found >> entries.place_bits).tolist(), places.tolist(), strict=True))
            == expected
        )
