# SPDX-License-Identifier: Apache-2.0
"""Scores, coverage, guard and selection against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import attention as oracle
from torch import Tensor

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selectors import block_topk as router
from sparsebalance_megatron.attention.selectors.block_topk import (
    RouterScores,
    coverage_at,
    coverage_curves,
    guard_budgets,
    router_scores,
    select_blocks,
)

GRANULARITIES = ("query-block", "token-kv-head", "token-query-head")
PACKINGS = ([0, 64], [0, 1, 2, 51, 70], [0, 37, 38, 61], [0, 1])
BLOCK = 8


def _inputs(
    tokens: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + heads)
    q_THD = torch.randn(tokens, heads, 8, generator=generator).to(dtype)
    k_TGD = torch.randn(tokens, kv_heads, 8, generator=generator).to(dtype)
    return q_THD, k_TGD


def _as_lists(selection: router.Selection) -> oracle.Lists:
    rows, heads, _ = selection.indices_RCK.shape
    return {
        (row, head): selection.indices_RCK[row, head, : selection.counts_RC[row, head]].tolist()
        for row in range(rows)
        for head in range(heads)
    }


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("budget", [1, 2, 3, 16])
def test_selection_is_mobas(granularity: str, cu_seqlens: list[int], budget: int) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(cu_seqlens[-1])
    scores = router_scores(q_THD, k_TGD, layout, granularity=granularity, softmax_scale=0.3)
    budgets_S = torch.full((layout.documents,), budget, dtype=torch.int32)
    budgets_S[-1] = 2
    selection = select_blocks(scores, budgets_S)
    expected = oracle.moba_lists(q_THD, k_TGD, cu_seqlens, BLOCK, budgets_S.tolist(), granularity)
    assert _as_lists(selection) == expected
    past_end_K = torch.arange(selection.indices_RCK.shape[2]) >= selection.counts_RC[..., None]
    assert (selection.indices_RCK[past_end_K] == -1).all()
    assert selection.indices_RCK.dtype == selection.counts_RC.dtype == torch.int32


@pytest.mark.parametrize("group", [1, 2, 4])
def test_selection_of_bfloat16_keys_uses_rounded_means(group: int) -> None:
    cu_seqlens = [0, 29, 90]
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(90, heads=4, kv_heads=4 // group, dtype=torch.bfloat16)
    scores = router_scores(q_THD, k_TGD, layout, granularity="token-query-head", softmax_scale=0.3)
    blocks = oracle.blocks_of(cu_seqlens, BLOCK)
    for row, head, own, kv_head, vector in oracle.selectors(
        q_THD, 4 // group, blocks, "token-query-head"
    ):
        expected = oracle.visible_scores(vector, k_TGD, kv_head, own, blocks)
        got = scores.scores_RCJ[row, head]
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
    scores = router_scores(*_inputs(90), layout, granularity="token-kv-head", softmax_scale=0.3)
    budgets_S = torch.tensor([3, 2])
    wide = select_blocks(scores, budgets_S)
    narrow = select_blocks(scores, budgets_S, max_budget=3)
    assert narrow.indices_RCK.shape[2] == 3
    assert torch.equal(narrow.indices_RCK, wide.indices_RCK[..., :3])
    assert torch.equal(narrow.counts_RC, wide.counts_RC)
    capped = select_blocks(scores, budgets_S, max_budget=2)
    assert torch.equal(capped.indices_RCK[40], wide.indices_RCK[40, :, :2])
    assert capped.counts_RC.max() == 2


def test_equal_scores_go_to_the_lower_block() -> None:
    layout = packed_layout([0, 320], BLOCK, "cpu")
    q_THD, k_TGD = torch.ones(320, 2, 4), torch.ones(320, 1, 4)
    scores = router_scores(q_THD, k_TGD, layout, granularity="query-block", softmax_scale=1.0)
    selection = select_blocks(scores, torch.tensor([4]))
    assert selection.indices_RCK[30, 0, :4].tolist() == [30, 0, 1, 2]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("chunk_elements", [1, 1 << 26])
def test_coverage_is_the_router_mass_inside(
    granularity: str, cu_seqlens: list[int], chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "_CHUNK_ELEMENTS", chunk_elements)
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    q_THD, k_TGD = _inputs(cu_seqlens[-1])
    scores = router_scores(q_THD, k_TGD, layout, granularity=granularity, softmax_scale=2.0)
    curves_SK = coverage_curves(scores)
    assert curves_SK.dtype == torch.float32
    assert (curves_SK.diff(dim=1) >= 0).all()
    for budget in range(1, layout.max_blocks + 1):
        expected = oracle.coverage(q_THD, k_TGD, cu_seqlens, BLOCK, granularity, 2.0, budget)
        torch.testing.assert_close(
            curves_SK[:, budget - 1], torch.tensor(expected), atol=2e-6, rtol=0
        )
    for document, blocks in enumerate(layout.blocks_per_document):
        assert (curves_SK[document, blocks - 1 :] == 1.0).all()


def test_coverage_lookup_reads_the_ends_outside() -> None:
    curves_SK = torch.tensor([[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]])
    assert coverage_at(curves_SK, torch.tensor([1, 9], dtype=torch.int32)).tolist() == [0.5, 1.0]
    grid_SK = torch.tensor([0, 2, 4]).expand(2, -1)
    assert coverage_at(curves_SK, grid_SK).tolist() == [[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]]


curves = st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=9).map(
    lambda values: [*sorted(values), 1.0]
)


@given(
    curve=curves,
    budget=st.integers(1, 15),
    base_budget=st.integers(1, 15),
    threshold=st.sampled_from([0.0, 1e-9, 0.05, 0.3, 0.99]),
)
@settings(max_examples=200, deadline=None)
def test_guard_keeps_the_floor_and_no_more(
    curve: list[float], budget: int, base_budget: int, threshold: float
) -> None:
    curves_SK = torch.tensor([curve])
    budgets_S = torch.tensor([budget], dtype=torch.int32)
    guarded_S, grown_S = guard_budgets(
        curves_SK, budgets_S, base_budget=base_budget, threshold=threshold
    )
    guarded = int(guarded_S)

    def at(k: int) -> Tensor:
        return curves_SK[0, min(k, len(curve)) - 1]

    floor = at(base_budget) - threshold
    assert at(guarded) >= floor
    assert guarded >= budget
    assert bool(grown_S) == (guarded > budget)
    assert guarded_S.dtype == budgets_S.dtype
    if guarded > budget:
        assert guarded <= base_budget
        assert all(at(k) < floor for k in range(1, guarded))


def test_guard_leaves_the_base_budget_alone() -> None:
    curves_SK = torch.rand(500, 7).sort(1).values
    base_S = torch.full((500,), 4)
    for threshold in (0.0, 0.1, 1 / 3):
        guarded_S, grown_S = guard_budgets(curves_SK, base_S, base_budget=4, threshold=threshold)
        assert torch.equal(guarded_S, base_S)
        assert not grown_S.any()


def test_guard_never_shrinks_where_a_curve_dips() -> None:
    curves_SK = torch.tensor([[0.5, 0.9, 0.9 - 6e-8, 1.0]])
    guarded_S, grown_S = guard_budgets(curves_SK, torch.tensor([3]), base_budget=2, threshold=0.0)
    assert guarded_S.tolist() == [3]
    assert not grown_S.any()


def test_a_second_pass_repeats_every_bit() -> None:
    layout = packed_layout([0, 50, 90], BLOCK, "cpu")
    q_THD, k_TGD = _inputs(90)

    def run() -> tuple[Tensor, Tensor]:
        scores = router_scores(q_THD, k_TGD, layout, granularity="query-block", softmax_scale=0.3)
        selection = select_blocks(scores, torch.tensor([3, 2]))
        return coverage_curves(scores), selection.indices_RCK

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_nothing_carries_a_gradient() -> None:
    layout = packed_layout([0, 20], BLOCK, "cpu")
    q_THD, k_TGD = (x.requires_grad_() for x in _inputs(20))
    scores = router_scores(q_THD, k_TGD, layout, granularity="query-block", softmax_scale=1.0)
    assert not scores.scores_RCJ.requires_grad


def test_bad_arguments_are_named() -> None:
    layout = packed_layout([0, 20], BLOCK, "cpu")
    q_THD, k_TGD = _inputs(20)
    with pytest.raises(ValueError, match="granularity 'token'"):
        router_scores(q_THD, k_TGD, layout, granularity="token", softmax_scale=1.0)
    with pytest.raises(ValueError, match="20 tokens as in the layout"):
        router_scores(q_THD[:9], k_TGD[:9], layout, granularity="query-block", softmax_scale=1.0)
    scores = RouterScores(
        granularity="query-block",
        scores_RCJ=torch.zeros(3, 1, 3),
        softmax_scale=1.0,
        layout=layout,
    )
    with pytest.raises(ValueError, match="each of the 1 documents"):
        select_blocks(scores, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="max_budget 0"):
        select_blocks(scores, torch.tensor([1]), max_budget=0)
    with pytest.raises(ValueError, match=r"threshold 1\.0"):
        guard_budgets(torch.ones(1, 3), torch.tensor([1]), base_budget=1, threshold=1.0)
    with pytest.raises(ValueError, match="base_budget 0"):
        guard_budgets(torch.ones(1, 3), torch.tensor([1]), base_budget=0, threshold=0.5)
