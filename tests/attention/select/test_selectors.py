# SPDX-License-Identifier: Apache-2.0
"""What every built-in selector promises, whatever it ranks by; coverage curves; who computes.

A device of type "cuda" is a name: none of these tests needs one.
"""

import importlib.util
import math
import warnings
from typing import Any

import pytest
import torch
from attention.cases import SELECTORS, drawn, ranked, selected
from attention.selector_check import Found, check_lists

from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.select.ranking import Ranking, coverage_at
from sparsebalance_megatron.attention.select.summaries import (
    MOST_BLOCKS,
    ranks_in_triton,
    takes_triton,
)
from sparsebalance_megatron.config import ConfigError, Router
from sparsebalance_megatron.selector_registry import BUILT_IN

LAYOUT = packed_layout([0, 21, 120, 157], 8, "cpu")
every_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


def _ranking(selector: Any, *, max_budget: int = 99, observe: bool = True) -> Ranking:
    return ranked(selector, drawn(157, 4, 2), LAYOUT, max_budget=max_budget, observe=observe)


@every_selector
def test_budgets_outside_the_ranking_count_as_its_ends(selector: Any) -> None:
    ranking = _ranking(selector, max_budget=4)
    outside, inside = (
        selector.select(ranking, torch.tensor(budgets)) for budgets in ([0, 99, -7], [1, 4, 1])
    )
    assert outside.counts_QC.min() == 1
    assert all(map(torch.equal, outside.tensors(), inside.tensors()))


@every_selector
def test_coverage_needs_observation(selector: Any) -> None:
    unseen = _ranking(selector, observe=False)
    assert unseen.mass_SK is None
    with pytest.raises(ValueError, match="observe=True"):
        selector.coverage(unseen)


@every_selector
def test_budgets_that_do_not_fit_are_named(selector: Any) -> None:
    with pytest.raises(ValueError, match="max_budget 0: must be at least 1 block"):
        _ranking(selector, max_budget=0)
    with pytest.raises(ValueError, match="each of the 3 documents"):
        selector.select(_ranking(selector), torch.tensor([3]))


def test_coverage_lookup_reads_the_ends_outside() -> None:
    curves_SK = torch.tensor([[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]])
    assert coverage_at(curves_SK, torch.tensor([1, 9], dtype=torch.int32)).tolist() == [0.5, 1.0]
    grid_SK = torch.tensor([0, 2, 4]).expand(2, -1)
    assert coverage_at(curves_SK, grid_SK).tolist() == [[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]]


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_CUDA = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def _rows(blocks: int) -> LayoutPair:
    return LayoutPair.within(packed_layout([0, blocks, blocks + 1], 1, "cpu"))


@ON_CUDA
def test_auto_takes_the_kernels_on_cuda_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert takes_triton("auto", CUDA)
        assert ranks_in_triton("auto", CUDA, _rows(MOST_BLOCKS), softmax_scale=0.1)
        assert not ranks_in_triton("torch", CUDA, _rows(MOST_BLOCKS), softmax_scale=0.1)
        assert not ranks_in_triton("auto", CPU, _rows(MOST_BLOCKS + 1), softmax_scale=-1.0)


@ON_CUDA
@pytest.mark.parametrize(
    ("blocks", "scale", "what"),
    [(MOST_BLOCKS + 1, 0.1, "up to 1024 blocks, not 1025"), (3, 0.0, "positive softmax scale")],
)
def test_what_the_kernels_do_not_serve_is_said(blocks: int, scale: float, what: str) -> None:
    with pytest.warns(UserWarning, match=f'"auto" takes "torch" on CUDA: .*{what}'):
        assert not ranks_in_triton("auto", CUDA, _rows(blocks), softmax_scale=scale)
    with pytest.raises(ValueError, match=f'router "triton" .*{what}.*use "torch" or "auto"'):
        ranks_in_triton("triton", CUDA, _rows(blocks), softmax_scale=scale)


def test_without_triton_cuda_ranks_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="package triton, which is not installed"):
        assert not takes_triton("auto", CUDA)
    with pytest.raises(ValueError, match="not installed"):
        takes_triton("triton", CPU)


@ON_CUDA
@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_an_explicit_choice_never_falls_back(selection: str) -> None:
    with pytest.raises(ValueError, match=r'router "triton" needs CUDA, and the keys lie on cpu'):
        _ranking(selector_named(selection, "triton"))


@pytest.mark.parametrize("router", ["triton", "torch"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_selectors_are_told_who_computes(name: str, router: Router) -> None:
    assert selector_named(name) is selector_named(name, "auto") is selector_named(name)
    if isinstance(selector_named(name), BlockTopK):
        found = selector_named(name, router)
        assert found.router == router and found.with_router("auto") == selector_named(name)
        return
    with pytest.raises(
        ConfigError, match=f"--sparse-balance-config router={router}: selection {name}"
    ):
        selector_named(name, router)


BLOCK = 16
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("budget", [2, 99])
@pytest.mark.parametrize("where", ["q", "k", "both"])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("selection", SELECTORS)
def test_own_block_is_first_and_only_visible_blocks_are_listed(
    selection: str, value: float, where: str, budget: int
) -> None:
    """One number in each of two blocks of the second of three documents is bad."""
    qk = drawn(203, 4, 2, head_dim=16)
    layout = packed_layout([0, 37, 139, 203], BLOCK, "cpu")
    expected = selected(selection, *qk, layout, [budget] * 3)
    for x in {"q": qk[:1], "k": qk[1:], "both": qk}[where]:
        x[[41, 90], 0, 3] = value
    found = selected(selection, *qk, layout, [budget] * 3)
    assert torch.equal(found.counts_QC, expected.counts_QC)
    lists, expected_lists = Found(selection=found), Found(selection=expected)
    check_lists(lists, layout, by_token=SELECTORS[selection].by_token, budgets=[budget] * 3)
    block_Q = layout.block_T if found.by_token else layout.number_N
    others_Q = layout.document_N[block_Q] != 1
    assert torch.equal(lists.blocks_QCK[others_Q], expected_lists.blocks_QCK[others_Q])
    assert torch.equal(lists.columns_QCK[others_Q], expected_lists.columns_QCK[others_Q])


def test_infinity_ranks_first_and_nan_last_of_the_others() -> None:
    """A head dim of 1 and queries of 1: a block's score is its key."""
    inf, nan = math.inf, math.nan
    layout = packed_layout([0, 9 * BLOCK], BLOCK, "cpu")
    # The first block comes after the own one, whatever its score.
    score_N = torch.tensor([nan, nan, -inf, 1.0, inf, -5.0, inf, nan, 2.0])
    k_TGD = score_N.repeat_interleave(BLOCK)[:, None, None]
    for selection, selector in SELECTORS.items():
        if not isinstance(selector, BlockTopK):
            continue
        ranking = ranked(selector, [torch.ones_like(k_TGD), k_TGD], layout, observe=True)
        indices_QCK = selector.select(ranking, torch.tensor([9])).indices_QCK
        row = 8 * BLOCK if selector.by_token else 8
        assert indices_QCK[row, 0].tolist() == [8, 0, 4, 6, 3, 5, 2, 1, 7], selection
        row = 5 * BLOCK if selector.by_token else 5
        assert indices_QCK[row, 0].tolist() == [5, 0, 4, 3, 2, 1, -1, -1, -1], selection
        assert selector.coverage(ranking).isnan().all()


@pytest.mark.parametrize("own_blocks", [[0, 1], [0, 1, 99], [-1, 1, 2], [0, 1, 2]])
def test_wrong_own_blocks_are_named(own_blocks: list[int]) -> None:
    local = packed_layout([0, 8, 16, 24], 8, "cpu")
    with pytest.raises(ValueError, match="own_blocks"):
        LayoutPair.of_blocks(local, LAYOUT, own_blocks)
