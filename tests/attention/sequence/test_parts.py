# SPDX-License-Identifier: Apache-2.0
"""Attention over members' slices one at a time, in one process, against that over the whole."""

from __future__ import annotations

import pytest
import torch
from attention.cases import SERVING, assert_as_good_as_plain, assert_exact, make_case
from attention.sequence.slices import BLOCK, in_parts, random_owners, slices_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.attention.sequence.slice import SequenceSlice

CU_SEQLENS, BUDGETS, BLOCKS = [0, 1, 2, 30, 51, 111], [1, 3, 2, 3, 5], 17


def _slices(members: int, seed: int) -> list[SequenceSlice]:
    return slices_of(CU_SEQLENS, random_owners(BLOCKS, members, seed), members)


@pytest.mark.parametrize(
    ("granularity", "implementation"), [pair for pair in SERVING if "last" not in pair[0]]
)
@settings(max_examples=6)
@given(members=st.integers(2, 5), seed=st.integers(0, 99))
def test_parts_are_the_whole(
    granularity: str, implementation: str, members: int, seed: int
) -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity=granularity)
    ours = in_parts(case, implementation, torch.float64, _slices(members, seed), seed)
    exact = case.ours("reference", torch.float64)
    assert_exact(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_lose_no_precision(dtype: torch.dtype) -> None:
    """Sums over parts are made in float32: the error is that of the inputs' dtype."""
    case = make_case(
        CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity="token-kv-head", dtype=dtype
    )
    ours = in_parts(case, "tokens", dtype, _slices(5, 1), 1)
    assert_as_good_as_plain(case, ours, dtype, case.plain(torch.float64))
