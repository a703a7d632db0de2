# SPDX-License-Identifier: Apache-2.0
"""Scores, coverage and selection against their definitions."""

from __future__ import annotations

import pytest
import torch
from oracles import attention as oracle
from torch import Tensor

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.selectors import SELECTORS, block_topk, selector_named
from sparsebalance_megatron.attention.selectors.block_topk import BlockScores

GRANULARITIES = tuple(SELECTORS)
PACKINGS = ([0, 64], [0, 1, 2, 51, 70], [0, 37, 38, 61], [0, 1])
BLOCK = 8


def _inputs(
    tokens: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + heads)
    q_THD = torch.randn(tokens, heads, 8, generator=generator).to(dtype)
    k_TGD = torch.randn(tokens, kv_heads, 8, generator=generator).to(dtype)
    return q_THD, k_TGD


def _as_lists(selection: Selection) -> oracle.Lists:
    rows, heads, _ = selection.indices_QCK.shape
    return {
        (row, head): selection.indices_QCK[row, head, : selection.counts_QC[row, head]].tolist()
        for row in range(rows)
        for head in range(heads)
    }


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("budget", [1, 2, 3, 16])
def test_selection_is_mobas(granularity: str, cu_seqlens: list[int], budget: int) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(cu_seqlens[-1])
    scores = SELECTORS[granularity].scores(q_THD, k_TGD, layout, softmax_scale=0.3)
    budgets_S = torch.full((layout.documents,), budget, dtype=torch.int32)
    budgets_S[-1] = 2
    selection = SELECTORS[granularity].select(scores, budgets_S)
    expected = oracle.moba_lists(q_THD, k_TGD, cu_seqlens, BLOCK, budgets_S.tolist(), granularity)
    assert _as_lists(selection) == expected
    past_end_K = torch.arange(selection.indices_QCK.shape[2]) >= selection.counts_QC[..., None]
    assert (selection.indices_QCK[past_end_K] == -1).all()
    assert selection.indices_QCK.dtype == selection.counts_QC.dtype == torch.int32


@pytest.mark.parametrize("group", [1, 2, 4])
def test_selection_of_bfloat16_keys_uses_rounded_means(group: int) -> None:
    cu_seqlens = [0, 29, 90]
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(90, heads=4, kv_heads=4 // group, dtype=torch.bfloat16)
    scores = SELECTORS["token-query-head"].scores(q_THD, k_TGD, layout, softmax_scale=0.3)
    blocks = oracle.blocks_of(cu_seqlens, BLOCK)
    for row, head, own, kv_head, vector in oracle.selectors(
        q_THD, 4 // group, blocks, "token-query-head"
    ):
        expected = oracle.visible_scores(vector, k_TGD, kv_head, own, blocks)
        got = scores.scores_QCJ[row, head]
        assert got[len(expected) :].eq(-torch.inf).all()
        # Products of bfloat16 are exact in float32: what is left is the sum's rounding.
        torch.testing.assert_close(
            got[: len(expected)].double(),
            torch.tensor(list(expected.values()), dtype=torch.float64),
            atol=1e-6,
            rtol=1e-6,
        )


def test_narrow_lists_are_the_wide_ones_cut() -> None:
    layout = packed_layout([0, 50, 90], BLOCK, "cpu")
    scores = SELECTORS["token-kv-head"].scores(*_inputs(90), layout, softmax_scale=0.3)
    budgets_S = torch.tensor([3, 2])
    wide = SELECTORS["token-kv-head"].select(scores, budgets_S)
    narrow = SELECTORS["token-kv-head"].select(scores, budgets_S, max_budget=3)
    assert narrow.indices_QCK.shape[2] == 3
    assert torch.equal(narrow.indices_QCK, wide.indices_QCK[..., :3])
    assert torch.equal(narrow.counts_QC, wide.counts_QC)
    capped = SELECTORS["token-kv-head"].select(scores, budgets_S, max_budget=2)
    assert torch.equal(capped.indices_QCK[40], wide.indices_QCK[40, :, :2])
    assert capped.counts_QC.max() == 2


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_budgets_below_one_read_the_own_block(granularity: str) -> None:
    layout = packed_layout([0, 50, 90, 99], BLOCK, "cpu")
    scores = SELECTORS[granularity].scores(*_inputs(99), layout, softmax_scale=0.3)
    for max_budget in (None, 3):
        low, least = (
            SELECTORS[granularity].select(scores, torch.tensor(budgets), max_budget=max_budget)
            for budgets in ([0, 3, -7], [1, 3, 1])
        )
        assert torch.equal(low.counts_QC, least.counts_QC)
        assert torch.equal(low.indices_QCK, least.indices_QCK)


def test_equal_scores_go_to_the_lower_block() -> None:
    layout = packed_layout([0, 320], BLOCK, "cpu")
    q_THD, k_TGD = torch.ones(320, 2, 4), torch.ones(320, 1, 4)
    scores = SELECTORS["query-block-lookahead"].scores(q_THD, k_TGD, layout, softmax_scale=1.0)
    selection = SELECTORS["query-block-lookahead"].select(scores, torch.tensor([4]))
    assert selection.indices_QCK[30, 0, :4].tolist() == [30, 0, 1, 2]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("chunk_elements", [1, 1 << 26])
def test_coverage_is_the_router_mass_inside(
    granularity: str, cu_seqlens: list[int], chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_topk, "_CHUNK_ELEMENTS", chunk_elements)
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(cu_seqlens[-1])
    scores = SELECTORS[granularity].scores(q_THD, k_TGD, layout, softmax_scale=2.0)
    curves_SK = SELECTORS[granularity].coverage(scores)
    assert curves_SK.dtype == torch.float32
    assert (curves_SK.diff(dim=1) >= 0).all()
    for budget in range(1, layout.max_blocks + 1):
        expected = oracle.coverage(q_THD, k_TGD, cu_seqlens, BLOCK, granularity, 2.0, budget)
        torch.testing.assert_close(
            curves_SK[:, budget - 1], torch.tensor(expected), atol=2e-6, rtol=0
        )
    for document, blocks in enumerate(layout.blocks_per_document):
        assert (curves_SK[document, blocks - 1 :] == 1.0).all()


def test_a_second_pass_repeats_every_bit() -> None:
    layout = packed_layout([0, 50, 90], BLOCK, "cpu")
    q_THD, k_TGD = _inputs(90)

    def run() -> tuple[Tensor, Tensor]:
        scores = SELECTORS["query-block-lookahead"].scores(q_THD, k_TGD, layout, softmax_scale=0.3)
        selection = SELECTORS["query-block-lookahead"].select(scores, torch.tensor([3, 2]))
        return SELECTORS["query-block-lookahead"].coverage(scores), selection.indices_QCK

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_nothing_carries_a_gradient() -> None:
    layout = packed_layout([0, 20], BLOCK, "cpu")
    q_THD, k_TGD = (x.requires_grad_() for x in _inputs(20))
    scores = SELECTORS["query-block-lookahead"].scores(q_THD, k_TGD, layout, softmax_scale=1.0)
    assert not scores.scores_QCJ.requires_grad


def test_bad_arguments_are_named() -> None:
    layout = packed_layout([0, 20], BLOCK, "cpu")
    q_THD, k_TGD = _inputs(20)
    with pytest.raises(ValueError, match="selection 'token': must be one of token-kv-head, "):
        selector_named("token")
    with pytest.raises(ValueError, match="20 tokens as in the layout"):
        SELECTORS["query-block-lookahead"].scores(q_THD[:9], k_TGD[:9], layout, softmax_scale=1.0)
    scores = BlockScores(
        by_token=False,
        scores_QCJ=torch.zeros(3, 1, 3),
        softmax_scale=1.0,
        layout=layout,
    )
    with pytest.raises(ValueError, match="each of the 1 documents"):
        SELECTORS["query-block-lookahead"].select(scores, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="max_budget 0"):
        SELECTORS["query-block-lookahead"].select(scores, torch.tensor([1]), max_budget=0)
