# SPDX-License-Identifier: Apache-2.0
"""Packed sequences and their boundaries against rows built token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import data as oracle

from sparsebalance_megatron.data.packing import Sample, pack, packed_cu_seqlens, padding_tokens

token_lists = st.lists(
    st.lists(st.integers(0, 65_000), min_size=2, max_size=9), min_size=1, max_size=6
)


@given(
    tokens=token_lists,
    multiple=st.integers(1, 8),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
@settings(max_examples=80)
def test_packing_equals_naive_packing(
    tokens: list[list[int]], multiple: int, dtype: type[np.number]
) -> None:
    samples = [Sample(tokens=np.array(sample, dtype=dtype)) for sample in tokens]
    row = pack(samples, pad_to_multiple_of=multiple)
    expected = oracle.packed_sequence([oracle.predictions(s) for s in tokens], multiple, 0)
    columns = (row.tokens, row.labels, row.position_ids, row.loss_mask)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.int64, np.float32]
    lengths_tokens = [len(sample) - 1 for sample in tokens]
    starts = [place for place, row in enumerate(expected) if row[2] == 0]
    boundaries = packed_cu_seqlens(lengths_tokens, multiple)
    assert [*boundaries] == [*starts, len(expected)]
    assert len(expected) == sum(lengths_tokens) + padding_tokens(sum(lengths_tokens), multiple)


def test_loss_masks_are_laid_beside_their_labels() -> None:
    masked = Sample(tokens=np.array([1, 2, 3]), loss_mask=np.array([0.0, 1.0], dtype=np.float32))
    row = pack([masked, Sample(tokens=np.array([4, 5]))], pad_to_multiple_of=4)
    assert row.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert row.labels[row.loss_mask > 0].tolist() == [3, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sample(tokens=np.array([], dtype=np.int64)), "at least 2 tokens"),
        (lambda: Sample(tokens=np.array([1])), "at least 2 tokens"),
        (lambda: Sample(tokens=np.arange(3), loss_mask=np.ones(3)), r"expected \(2,\)"),
        (lambda: pack([]), "at least 1 token"),
        (lambda: packed_cu_seqlens([3], 0), "pad_to_multiple_of is 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
