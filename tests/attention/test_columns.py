# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks and single columns, in every implementation that serves it.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks, K places
of a list.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from attention.cases import (
    SCALE,
    Case,
    assert_as_good_as_plain,
    compute_as_off_the_cpu,
    make_case,
)
from oracles import vertical_slash as oracle
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention, kernel_named
from sparsebalance_megatron.attention.selection import ColumnLists

BLOCK = 8
CU_SEQLENS, BUDGETS = [0, 1, 30, 111, 190], [1, 2, 3, 8]
IMPLEMENTATIONS = ("blocks", "reference")


class ColumnCase(Case):
    """A case whose masks come from the definition, and from the lists, columns included."""

    @functools.cached_property
    def mask_HTT(self) -> Tensor:
        layout = self.selection.query_layout
        ranked = oracle.ranked(
            *(self.q_THD, self.k_TGD, list(layout.cu_seqlens), layout.block_size, SCALE),
            looks_ahead=self.granularity == "vertical-slash-last-queries",
        )
        choices = {
            (row, head): oracle.cut(
                order,
                self.budgets[int(layout.document_N[row])],
                list(layout.cu_seqlens),
                layout.block_size,
            )
            for (row, head), order in ranked.items()
        }
        return self._mask_of(choices)

    @functools.cached_property
    def listed_HTT(self) -> Tensor:
        columns = self.selection.columns
        assert columns is not None
        return self._mask_of(
            {
                (row, head): oracle.Choice(
                    blocks=self.selection.indices_QCK[row, head, :count].tolist(),
                    columns=columns.tokens_NGK[
                        row, head, : int(columns.counts_NG[row, head])
                    ].tolist(),
                )
                for row, heads in enumerate(self.selection.counts_QC.tolist())
                for head, count in enumerate(heads)
            }
        )

    def _mask_of(self, choices: dict[tuple[int, int], oracle.Choice]) -> Tensor:
        layout = self.selection.query_layout
        return oracle.mask(choices, self.q_THD.shape[1], list(layout.cu_seqlens), layout.block_size)


def _case(granularity: str = "vertical-slash", **options: Any) -> ColumnCase:
    case = make_case(
        CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity=granularity, **options
    )
    return ColumnCase(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})


def _exact(case: Case) -> tuple[Tensor, ...]:
    """Masked dense attention in float64, under the mask of the definition."""
    return case.run(lambda q, k, v: oracle_attention(q, k, v, case.mask_HTT), torch.float64)


def oracle_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, mask_HTT: Tensor
) -> tuple[Tensor, Tensor]:
    group = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THD = k_TGD.repeat_interleave(group, 1), v_TGD.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q_THD, k_THD) * SCALE
    logits = logits.masked_fill(~mask_HTT, -torch.inf)
    out_THD = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v_THD)
    return out_THD, logits.logsumexp(-1).t()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("granularity", "kv_heads"),
    [("vertical-slash", 1), ("vertical-slash", 2), ("vertical-slash-last-queries", 4)],
)
def test_float64_is_the_definitions(implementation: str, granularity: str, kv_heads: int) -> None:
    case = _case(granularity, kv_heads=kv_heads)
    assert case.selection.columns is not None and case.selection.columns.counts_NG.max() == 16
    for ours, exact in zip(case.ours(implementation, torch.float64), _exact(case), strict=True):
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
    exact = case.run(lambda q, k, v: oracle_attention(q, k, v, case.listed_HTT), torch.float64)
    assert_as_good_as_plain(case, case.ours(implementation, dtype), dtype, exact)


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
    case = _case()
    for implementation, complaint in (
        ("triton", 'reads no single columns.*use "blocks" or "auto"'),
        ("tokens", 'serves selections by token.*use "auto"'),
    ):
        with pytest.raises(ValueError, match=complaint):
            case.ours(implementation, torch.float32)
        assert kernel_named(implementation).obstacle(case.q_THD, case.selection) is not None


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
