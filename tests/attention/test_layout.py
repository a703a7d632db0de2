# SPDX-License-Identifier: Apache-2.0
"""The block grid of a packed sequence."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.attention import blocks_of

from sparsebalance_megatron.attention.layout import packed_layout

rows = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
        lambda lengths: [0, *itertools.accumulate(lengths)]
    ),
    st.sampled_from([1, 2, 8, 16, 64]),
)


@given(rows)
def test_blocks_are_cut_as_defined(row: tuple[list[int], int]) -> None:
    cu_seqlens, block_size = row
    layout = packed_layout(cu_seqlens, block_size, "cpu")
    blocks = blocks_of(cu_seqlens, block_size)
    assert layout.blocks == len(blocks)
    assert layout.document_N.tolist() == [document for document, _, _ in blocks]
    assert layout.start_N.tolist() == [begin for _, begin, _ in blocks]
    assert layout.length_N.tolist() == [end - begin for _, begin, end in blocks]
    assert layout.document_end_N.tolist() == [cu_seqlens[block[0] + 1] for block in blocks]
    firsts = [
        next(n for n, block in enumerate(blocks) if block[0] == document)
        for document in range(layout.documents)
    ]
    assert layout.first_block_S.tolist() == firsts
    assert layout.index_N.tolist() == [n - firsts[block[0]] for n, block in enumerate(blocks)]
    assert layout.blocks_S.tolist() == list(layout.blocks_per_document)
    assert layout.max_blocks == max(layout.blocks_per_document)
    expected_block_T = [
        next(n for n, (_, begin, end) in enumerate(blocks) if begin <= token < end)
        for token in range(layout.tokens)
    ]
    assert layout.block_T.tolist() == expected_block_T
    assert layout.tokens_S.tolist() == [b - a for a, b in itertools.pairwise(cu_seqlens)]


@given(rows)
def test_blocks_hold_the_tokens_and_zeros(row: tuple[list[int], int]) -> None:
    layout = packed_layout(*row, "cpu")
    x_T = torch.arange(1.0, layout.tokens + 1)[:, None].expand(-1, 3)
    x_NB = layout.to_blocks(x_T)
    # Short documents do not pay for long blocks.
    assert x_NB.shape == (layout.blocks, max(layout.length_N), 3)
    for block, (begin, length) in enumerate(zip(layout.start_N, layout.length_N, strict=True)):
        assert torch.equal(x_NB[block, :length], x_T[begin : begin + length])
        assert (x_NB[block, length:] == 0).all()
    assert torch.equal(layout.from_blocks(x_NB), x_T)


@pytest.mark.parametrize(
    ("cu_seqlens", "block_size", "message"),
    [
        ([0, 4], 0, "block_size 0"),
        ([1, 4], 2, "starts at 1"),
        ([0, 4, 4], 2, "document 1 has 0 tokens"),
        ([0, 4, 2], 2, "document 1 has -2 tokens"),
        ([0], 2, "at least one document"),
    ],
)
def test_bad_rows_are_refused(cu_seqlens: list[int], block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_layout(cu_seqlens, block_size, "cpu")


@given(rows)
def test_tensors_are_aligned_alike_whatever_the_row(row: tuple[list[int], int]) -> None:
    """Triton compiles anew for pointers that were multiples of 16 bytes and are not any more."""
    layout = packed_layout(*row, "cpu")
    tensors = [x for x in vars(layout).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 12
    first = min(x.data_ptr() for x in tensors)
    assert all((x.data_ptr() - first) % 128 == 0 for x in tensors)
