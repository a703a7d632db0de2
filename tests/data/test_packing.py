# SPDX-License-Identifier: Apache-2.0
"""Packed sequences against rows built token by token, and unpacking gives the samples back."""

from __future__ import annotations

import itertools

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


@given(tokens=token_lists, multiple=st.integers(1, 8))
@settings(max_examples=40)
def test_boundaries_give_the_samples_back(tokens: list[list[int]], multiple: int) -> None:
    row = pack([Sample(tokens=np.array(sample)) for sample in tokens], pad_to_multiple_of=multiple)
    lengths_tokens = [len(sample) - 1 for sample in tokens]
    cu_seqlens = packed_cu_seqlens(lengths_tokens, multiple)
    padding = padding_tokens(sum(lengths_tokens), multiple)
    assert cu_seqlens[-1] == len(row.tokens) == sum(lengths_tokens) + padding
    assert cu_seqlens[-1] % multiple == 0
    assert 0 <= padding < multiple
    assert len(cu_seqlens) == len(tokens) + 1 + bool(padding)
    unpacked = [
        [*row.tokens[start:end].tolist(), int(row.labels[end - 1])]
        for start, end in itertools.pairwise(cu_seqlens)
    ]
    assert unpacked[: len(tokens)] == tokens


def test_loss_masks_are_laid_beside_their_labels() -> None:
    masked = Sample(tokens=np.array([1, 2, 3]), loss_mask=np.array([0.0, 1.0], dtype=np.float32))
    row = pack([masked, Sample(tokens=np.array([4, 5]))], pad_to_multiple_of=4)
    assert row.loss_mask.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert row.labels[row.loss_mask > 0].tolist() == [3, 5]


@pytest.mark.parametrize("tokens", [[], [1]])
def test_sample_without_prediction_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        Sample(tokens=np.array(tokens, dtype=np.int64))


def test_loss_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \(2,\)"):
        Sample(tokens=np.array([1, 2, 3]), loss_mask=np.ones(3, dtype=np.float32))


def test_empty_sequences_and_bad_multiples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        pack([])
    with pytest.raises(ValueError, match="pad_to_multiple_of is 0"):
        packed_cu_seqlens([3], 0)
