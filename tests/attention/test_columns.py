# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks and single columns on the CPU; Triton's is beside its kernels.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, N blocks, K places of a
list.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention.cases import SCALE, assert_as_good_as_plain, compute_as_off_the_cpu
from attention.column_cases import ColumnCase, make_column_case

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.selection import ColumnLists

BLOCK = 8
CU_SEQLENS, BUDGETS = [0, 1, 30, 111, 190], [1, 2, 3, 8]
IMPLEMENTATIONS = ("blocks", "reference")


def _case(granularity: str = "vertical-slash", **options: Any) -> ColumnCase:
    return make_column_case(
        CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity=granularity, **options
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("granularity", "kv_heads"),
    [("vertical-slash", 1), ("vertical-slash", 2), ("vertical-slash-last-queries", 4)],
)
def test_float64_is_the_definitions(implementation: str, granularity: str, kv_heads: int) -> None:
    case = _case(granularity, kv_heads=kv_heads)
    assert case.selection.columns is not None and case.selection.columns.counts_NG.max() == 16
    exactly = case.exact()
    for ours, exact in zip(case.ours(implementation, torch.float64), exactly, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rounding_costs_what_it_costs_plain_attention(
    implementation: str, off_the_cpu: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    case = _case(dtype=dtype)
    assert_as_good_as_plain(
        case, case.ours(implementation, dtype), dtype, case.plain(torch.float64)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_second_pass_repeats_every_bit(implementation: str) -> None:
    case = _case()
    first, second = (case.ours(implementation, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_lies_past_a_list_of_columns_is_not_read(implementation: str) -> None:
    case = _case()
    columns = case.selection.columns
    assert columns is not None
    past_end = torch.arange(columns.tokens_NGK.shape[2]) >= columns.counts_NG[..., None]
    spoiled = dataclasses.replace(columns, tokens_NGK=columns.tokens_NGK.masked_fill(past_end, 99))
    selection = dataclasses.replace(case.selection, columns=spoiled)
    expected = case.ours(implementation, torch.float32)
    found = dataclasses.replace(case, selection=selection).ours(implementation, torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_document_of_nan_stays_alone(
    implementation: str, off_the_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    case = _case()
    clean = case.ours(implementation, torch.float32)
    own = slice(*CU_SEQLENS[2:4])
    for x in (case.q_THD, case.k_TGD, case.v_TGD, case.dout_THD):
        x[own] = torch.nan
    for found, expected in zip(case.ours(implementation, torch.float32), clean, strict=True):
        assert found[own].isnan().all()
        assert torch.equal(found[: own.start], expected[: own.start])
        assert torch.equal(found[own.stop :], expected[own.stop :])


def test_who_reads_no_columns_says_so() -> None:
    with pytest.raises(ValueError, match=r'serves selections by token.*use "auto"'):
        _case().ours("tokens", torch.float32)


def test_columns_that_do_not_fit_are_named() -> None:
    case = _case()
    columns = case.selection.columns
    assert columns is not None
    wrong = ColumnLists(tokens_NGK=columns.tokens_NGK[:, :1], counts_NG=columns.counts_NG)
    with pytest.raises(ValueError, match=r"has columns \(26, 1, 16\) and counts \(26, 2\)"):
        block_sparse_attention(
            *(case.q_THD, case.k_TGD, case.v_TGD),
            dataclasses.replace(case.selection, columns=wrong),
            softmax_scale=SCALE,
        )
