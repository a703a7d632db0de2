# SPDX-License-Identifier: Apache-2.0
"""Documents of which everything is selected go to torch's dense attention, and no others do.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, Q rows and C
heads that select, N blocks, K places of a list.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention.cases import SCALE, make_case
from attention.sequence.slices import local_selection, slices_of

from sparsebalance_megatron.attention.api import budgeted_attention
from sparsebalance_megatron.attention.kernels import blocks as module
from sparsebalance_megatron.attention.kernels.blocks import split_dense_documents
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection

GRANULARITIES = ["previous-block", "token-kv-head", "token-query-head"]
CU_SEQLENS, BUDGETS = [0, 30, 47, 52, 93], [4, 2, 1, 9]
"""Blocks of 8 tokens: 4, 3, 1 and 6; everything is selected of all but the second."""


@pytest.fixture(autouse=True)
def short_documents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_DENSE_TOKENS", 1)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_found_are_documents_whose_budget_holds_all_blocks(granularity: str) -> None:
    """A document of one block is its own block, which is never gathered."""
    case = make_case(CU_SEQLENS, BUDGETS, block=8, head_dim=8, granularity=granularity)
    documents, others = split_dense_documents(case.selection)
    assert documents == [slice(0, 30), slice(52, 93)]
    layout = case.selection.query_layout
    block_Q = layout.block_T if case.selection.by_token else layout.number_N
    dense_Q = torch.isin(layout.document_N[block_Q], torch.tensor([0, 3]))
    assert (others.counts_QC[dense_Q] == 0).all()
    kept = others.counts_QC[~dense_Q]
    assert torch.equal(kept, case.selection.counts_QC[~dense_Q])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_are_those_of_gathered_blocks(
    granularity: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=8, head_dim=8, granularity=granularity)
    dense = case.ours("auto", dtype)
    monkeypatch.setattr(module, "_LEAST_DENSE_TOKENS", 1000)
    gathered = case.ours("auto", dtype)
    assert [x.dtype for x in dense] == [x.dtype for x in gathered]
    # One rounding of bfloat16 outputs; gradients follow from an output that was rounded.
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    for a, b in zip(dense, gathered, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=tolerance)


def test_one_missing_entry_makes_a_document_sparse() -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=8, head_dim=8, granularity="token-kv-head")
    counts_QC = case.selection.counts_QC.clone()
    counts_QC[29, 1] -= 1
    selection = dataclasses.replace(case.selection, counts_QC=counts_QC)
    assert split_dense_documents(selection)[0] == [slice(52, 93)]


def test_keys_in_a_row_of_their_own_are_gathered() -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=8, head_dim=8)
    owner_N = np.arange(case.selection.query_layout.blocks) % 2
    held = slices_of(CU_SEQLENS, owner_N, 2, block=8)[0]
    assert split_dense_documents(local_selection(case.selection, held))[0] == []


def test_lists_that_reach_before_the_document_are_gathered() -> None:
    """A row's documents need not be the training documents: lists are as long, but elsewhere."""
    layout = packed_layout([0, 16, 32], 8, "cpu")
    indices_NGK = torch.tensor([[0, -1], [1, 0], [2, -1], [3, 1]], dtype=torch.int32)[:, None]
    selection = Selection.within(
        layout, indices_QCK=indices_NGK, counts_QC=(indices_NGK >= 0).sum(-1).int(), by_token=False
    )
    assert split_dense_documents(selection)[0] == [slice(0, 16)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("budget", [4, 99])
def test_later_tokens_change_no_bit_of_long_documents(granularity: str, budget: int) -> None:
    """Longer than one tile of queries of any of torch's sizes up to 64; also where it is dense."""
    generator = torch.Generator().manual_seed(5)
    qkv = [torch.randn(460, heads, 16, generator=generator) for heads in (4, 2, 2)]

    def before(token: int, changed: bool) -> list[torch.Tensor]:
        leaves = [x.clone() for x in qkv]
        for x in leaves:
            x[token] = -30.0 * x[token] + 5.0 if changed else x[token]
            x.requires_grad_()
        out_THD, lse_TH = budgeted_attention(
            *leaves, [0, 40, 460], budget, block_size=32, softmax_scale=SCALE, selection=granularity
        )
        out_THD[:token].square().sum().backward()
        return [x.detach()[:token] for x in (out_THD, lse_TH, *(leaf.grad for leaf in leaves))]

    for token in (41, 200, 331, 459):
        assert all(map(torch.equal, before(token, True), before(token, False)))
