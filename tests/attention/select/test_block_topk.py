# SPDX-License-Identifier: Apache-2.0
"""Lists and coverage against their definitions."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attention.cases import SELECTORS, drawn, listed, ranked
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import attention as oracle
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select import selector_named, streaming
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.select.ranking import Ranking

KINDS = tuple(name for name, selector in SELECTORS.items() if isinstance(selector, BlockTopK))
BLOCK = 8


def _ranking(
    kind: str,
    inputs: Sequence[Tensor],
    cu_seqlens: list[int],
    *,
    first_blocks: int = 1,
    **options: Any,
) -> Ranking:
    selector = selector_named(kind, first_blocks=first_blocks)
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    return ranked(selector, inputs, layout, softmax_scale=0.3, **options)


EPSILON = torch.finfo(torch.float32).eps
SCORE_ROUNDING = 80 * EPSILON
"""A score sums eight products of numbers up to about 5, of which each may be rounded."""
COVERAGE_ROUNDING = 40 * EPSILON
"""Rounding of scores that are scaled by 0.3, and of a sum over a document's masses."""


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    places=st.integers(1, 9),
    first_blocks=st.integers(0, 3),
    chunk_elements=st.sampled_from([1, 100, 1 << 18]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_chunks_give_what_the_definition_gives(
    lengths: list[int],
    kind: str,
    group: int,
    dtype: torch.dtype,
    places: int,
    first_blocks: int,
    chunk_elements: int,
    seed: int,
) -> None:
    """Lists but for scores that differ by rounding alone; coverage of every budget."""
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    inputs = [x.to(dtype) for x in drawn(cu_seqlens[-1], 4, 4 // group, seed=seed)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "SCORES_AT_ONCE", chunk_elements)
        ranking = _ranking(
            kind,
            inputs,
            cu_seqlens,
            max_budget=places,
            observe=True,
            first_blocks=first_blocks,
        )
    selector = selector_named(kind)
    selection = selector.select(ranking, torch.full((len(lengths),), places))
    assert (selection.indices_QCK.dtype, selection.counts_QC.dtype) == (torch.int16, torch.int32)
    found = listed(selection.indices_QCK, selection.counts_QC)
    expected = oracle.moba_lists(
        *inputs, cu_seqlens, BLOCK, [places] * len(lengths), kind, first_blocks
    )
    assert found.keys() == expected.keys()
    blocks = oracle.blocks_of(cu_seqlens, BLOCK)
    for row, head, own, kv_head, vector in oracle.selectors(
        inputs[0], inputs[1].shape[1], blocks, kind
    ):
        scores = oracle.visible_scores(vector, inputs[1], kv_head, own, blocks)
        assert len(set(found[row, head])) == len(found[row, head])
        for here, there in zip(found[row, head], expected[row, head], strict=True):
            assert abs(scores[here] - scores[there]) <= SCORE_ROUNDING
    curves_SK = selector.coverage(ranking)
    assert curves_SK.dtype == torch.float32 and (curves_SK.diff(dim=1) >= 0).all()
    for document, tokens in enumerate(lengths):
        assert (curves_SK[document, -(-tokens // BLOCK) - 1 :] == 1.0).all()
    for budget in range(1, curves_SK.shape[1] + 1):
        covered = oracle.coverage(*inputs, cu_seqlens, BLOCK, kind, 0.3, budget, first_blocks)
        torch.testing.assert_close(
            curves_SK[:, budget - 1], torch.tensor(covered), atol=COVERAGE_ROUNDING, rtol=0
        )


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0, -0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_go_to_the_lower_block(kind: str, sign: float) -> None:
    """Zeros of either sign are equal too."""
    q_THD, k_TGD = sign * torch.ones(320, 2, 4), torch.ones(320, 1, 4)
    k_TGD[160:] = k_TGD[160:].copysign(torch.tensor(1.0 if sign else -1.0))
    ranking = _ranking(kind, (q_THD, k_TGD), [0, 320], max_budget=4)
    row = 30 * BLOCK if ranking.by_token else 30
    assert ranking.indices_QCK[row, 0].tolist() == [30, 0, 1, 2]


@pytest.mark.parametrize("chunk_elements", [100, 1 << 18])
def test_blocks_may_be_scored_otherwise(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int
) -> None:
    """By the greatest product of a block's keys, say."""
    monkeypatch.setattr(streaming, "SCORES_AT_ONCE", chunk_elements)
    cu_seqlens = [0, 5, 61, 90]
    q_THD, k_TGD = drawn(90, 2, 2, seed=3)
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    bounds = layout.bounds_on_host

    def score(rows: slice, blocks: slice) -> Tensor:
        products_CYT = torch.einsum("ycd,tcd->cyt", q_THD[rows], k_TGD)
        ends = zip(bounds[:-1][blocks], bounds[1:][blocks], strict=True)
        return torch.stack([products_CYT[..., a:b].amax(-1) for a, b in ends], dim=-1)

    indices_TCK, _ = streaming.rank_in_chunks(
        *(q_THD[:, :, None], torch.zeros(layout.blocks, 2, 8), LayoutPair.within(layout)),
        by_token=True,
        softmax_scale=1.0,
        places=3,
        observe=False,
        score=score,
    )
    scores_CTN = score(slice(None), slice(None))
    for token, head in itertools.product(range(90), range(2)):
        own = int(np.searchsorted(bounds, token, side="right")) - 1
        first = int(layout.document_first_N[own])
        best = sorted(range(first, own), key=lambda block: -scores_CTN[head, token, block])[:2]
        expected = [own, *best, -1, -1][:3]
        assert indices_TCK[token, head].tolist() == expected
