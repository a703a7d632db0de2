# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in one document: its lists stay whole, and no other document notices.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention.cases import SCALE, SELECTORS, SERVING, compute_as_off_the_cpu, selected
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
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


def _attend(qkv: list[Tensor], selection: str, implementation: str) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out_THD, lse_TH = block_sparse_attention(
        *leaves,
        _select(qkv[0], qkv[1], selection),
        softmax_scale=SCALE,
        implementation=implementation,
    )
    out_THD.backward(_inputs()[-1])
    return [out_THD.detach(), lse_TH, *(leaf.grad for leaf in leaves)]


def _elsewhere(x_T: Tensor) -> Tensor:
    return torch.cat((x_T[: BROKEN.start], x_T[BROKEN.stop :]))


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
    selected = _select(q_THD, k_TGD, selection, budget)
    assert torch.equal(selected.counts_QC, expected.counts_QC)
    layout = selected.query_layout
    for row in range(selected.selecting_rows):
        own = int(layout.block_T[row]) if selected.by_token else row
        document = int(layout.document_N[own])
        for head in range(selected.counts_QC.shape[1]):
            count = int(selected.counts_QC[row, head])
            listed = selected.indices_QCK[row, head, :count].tolist()
            assert listed[0] == own
            assert len(set(listed)) == count
            assert int(layout.first_block_S[document]) <= min(listed)
            assert max(listed) == own
            if document != 1:
                assert listed == expected.indices_QCK[row, head, :count].tolist()
            if selected.columns is not None and expected.columns is not None:
                count = int(selected.columns.counts_NG[row, head])
                columns = selected.columns.tokens_NGK[row, head, :count].tolist()
                assert count == expected.columns.counts_NG[row, head]
                assert not {int(layout.block_T[token]) for token in columns} & {*listed}
                assert all(BOUNDARIES[document] <= token for token in columns)
                assert all(token < layout.start_N[own] for token in columns)
                if document != 1:
                    assert columns == expected.columns.tokens_NGK[row, head, :count].tolist()


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


@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_outputs_and_gradients_of_other_documents_keep_every_bit(
    selection: str,
    implementation: str,
    value: float,
    off_the_cpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    *qkv, _ = _inputs()
    broken = _attend([_spoil(x, value) for x in qkv], selection, implementation)
    clean = _attend(qkv, selection, implementation)
    for ours, expected in zip(broken, clean, strict=True):
        assert torch.equal(_elsewhere(ours), _elsewhere(expected))
        assert not torch.equal(ours[BROKEN], expected[BROKEN])
