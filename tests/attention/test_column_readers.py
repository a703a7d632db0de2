# SPDX-License-Identifier: Apache-2.0
"""Readers of every column, as the kernel that adds up their gradients takes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from sparsebalance_megatron.attention.kernels.triton import column_gradient_kernels as kernels

TOKENS, HEADS, PLACES = 6, 2, 4
Lists = list[list[list[int]]]


@given(
    st.lists(
        st.lists(
            st.lists(st.integers(0, TOKENS - 1), max_size=PLACES, unique=True),
            min_size=HEADS,
            max_size=HEADS,
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60)
def test_readers_are_those_of_the_lists(lists: Lists) -> None:
    """By row of dk, in the order of their blocks; what lies past a list's end is nobody's."""
    tokens_JGK = torch.full((len(lists), HEADS, PLACES), 1 << 30, dtype=torch.int32)
    counts_JG = torch.tensor([[len(found) for found in heads] for heads in lists])
    expected: dict[int, list[int]] = {}
    for reader, heads in enumerate(lists):
        for head, found in enumerate(heads):
            tokens_JGK[reader, head, : len(found)] = torch.tensor(found, dtype=torch.int32)
            for place, token in enumerate(found):
                source = (reader * HEADS + head) * PLACES + place
                expected.setdefault(token * HEADS + head, []).append(source)
    source_E, length_E, row_E = kernels._readers_by_row(tokens_JGK, counts_JG.int(), TOKENS)
    sources = source_E.tolist()
    assert sorted(sources) == list(range(len(lists) * HEADS * PLACES))
    ranges = {
        int(row_E[first]): sources[first : first + length]
        for first, length in enumerate(length_E.tolist())
        if length
    }
    assert ranges == expected
    assert int((length_E > 0).sum()) == len(expected)
