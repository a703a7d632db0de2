# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in one document: its lists stay whole, and no other document notices.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention.cases import SELECTORS, selected
from attention.selector_check import check_lists, each_list
from torch import Tensor

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.selection import Selection

BLOCK = 16
BOUNDARIES = [0, 37, 139, 203]
BROKEN = slice(37, 139)
"""The tokens of the document with bad numbers: 7 blocks, the last of 6 tokens."""
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _inputs() -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(203, heads, 16, generator=generator) for heads in (4, 2, 2, 4))


def _spoil(x_THD: Tensor, value: float) -> Tensor:
    """One number in each of two blocks of the broken document."""
    x_THD = x_THD.clone()
    x_THD[[41, 90], 0, 3] = value
    return x_THD


def _select(q_THD: Tensor, k_TGD: Tensor, selection: str, budget: int = 3) -> Selection:
    layout = packed_layout(BOUNDARIES, BLOCK, "cpu")
    return selected(selection, q_THD, k_TGD, layout, [budget] * 3)


@pytest.mark.parametrize("budget", [2, 99])
@pytest.mark.parametrize("where", ["q", "k", "both"])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("selection", SELECTORS)
def test_own_block_is_first_and_only_visible_blocks_are_listed(
    selection: str, value: float, where: str, budget: int
) -> None:
    q_THD, k_TGD, *_ = _inputs()
    expected = _select(q_THD, k_TGD, selection, budget)
    q_THD = _spoil(q_THD, value) if where != "k" else q_THD
    k_TGD = _spoil(k_TGD, value) if where != "q" else k_TGD
    found = _select(q_THD, k_TGD, selection, budget)
    assert torch.equal(found.counts_QC, expected.counts_QC)
    lists, expected_lists = (each_list(found), each_list(expected))
    layout = found.query_layout
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
        ranking = rank_sequence(
            selector,
            *(torch.ones_like(k_TGD), k_TGD, layout),
            softmax_scale=1.0,
            max_budget=9,
            observe=True,
        )
        indices_QCK = selector.select(ranking, torch.tensor([9])).indices_QCK
        row = 8 * BLOCK if selector.by_token else 8
        assert indices_QCK[row, 0].tolist() == [8, 0, 4, 6, 3, 5, 2, 1, 7], selection
        row = 5 * BLOCK if selector.by_token else 5
        assert indices_QCK[row, 0].tolist() == [5, 0, 4, 3, 2, 1, -1, -1, -1], selection
        assert selector.coverage(ranking).isnan().all()
