# SPDX-License-Identifier: Apache-2.0
"""Blocks of a sequence dealt to several members: together they rank as one.

Shape legend: T tokens of a sequence, H query heads, G KV heads, D head dim, S documents, N blocks.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from attention.cases import SELECTORS, example_selector
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named

BLOCK, TOKENS = 8, 157
CU_SEQLENS = [0, 21, 29, 120, 157]
DEALS = {
    "contiguous": lambda blocks: [range(blocks // 2), range(blocks // 2, blocks)],
    "zigzag": lambda blocks: [
        [n for n in range(blocks) if (n % 6) in (member, 5 - member)] for member in range(3)
    ],
    "reversed": lambda blocks: [range(blocks - 1, -1, -2), range(blocks - 2, -1, -2)],
}
EVERY_SELECTOR = SELECTORS | {"quest": example_selector()}
OPTIONS = {"softmax_scale": 0.7, "max_budget": 4, "observe": True}


def _inputs() -> tuple[Tensor, Tensor]:
    """Small integers: all sums and products are exact, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    q_THD = torch.randint(-8, 9, (TOKENS, 4, 8), generator=generator).float()
    return q_THD, torch.randint(-8, 9, (TOKENS, 2, 8), generator=generator).float()


def _sequence_of(
    layout: PackedLayout, blocks: list[int], x_T: Tensor
) -> tuple[PackedLayout, Tensor]:
    """A sequence of some blocks, each a document of its own, and their tokens."""
    bounds = layout.bounds_on_host.tolist()
    tokens = [x for n in blocks for x in range(bounds[n], bounds[n + 1])]
    boundaries = [0, *itertools.accumulate(bounds[n + 1] - bounds[n] for n in blocks)]
    return packed_layout(boundaries, BLOCK, "cpu"), x_T[tokens]


@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS)
@pytest.mark.parametrize(
    "granularity",
    [
        name
        for name, one in EVERY_SELECTOR.items()
        if not getattr(one, "needs_whole_documents", False)
    ],
)
def test_members_of_a_group_rank_as_one(granularity: str, deal) -> None:
    selector, layout = EVERY_SELECTOR[granularity], packed_layout(CU_SEQLENS, BLOCK, "cpu")
    q_THD, k_TGD = _inputs()
    whole = rank_sequence(selector, q_THD, k_TGD, layout, **OPTIONS)
    members = [list(blocks) for blocks in deal(layout.blocks)]

    order = torch.tensor(list(itertools.chain(*members))).argsort()
    parts = []
    for blocks in members:
        local_layout, local_q_THD = _sequence_of(layout, blocks, q_THD)
        _, local_k_TGD = _sequence_of(layout, blocks, k_TGD)
        parts.append(selector.summaries(local_q_THD, local_k_TGD, local_layout))
    gathered = parts[0].joined(
        [
            torch.cat(tensors)[order]
            for tensors in zip(
                *(
                    part.parts(_sequence_of(layout, blocks, q_THD)[0])
                    for part, blocks in zip(parts, members, strict=True)
                ),
                strict=True,
            )
        ],
        layout,
    )

    rankings = []
    for blocks in members:
        local_layout, local_q_THD = _sequence_of(layout, blocks, q_THD)
        rows = LayoutPair.of_blocks(local_layout, layout, blocks)
        rankings.append(selector.rank(local_q_THD, gathered, rows, **OPTIONS))
        for name in ("indices_QCK", *(["columns_NGX"] if whole.columns_NGX is not None else [])):
            expected_QCK = getattr(whole, name)[blocks]
            if selector.by_token:
                _, expected_QCK = _sequence_of(layout, blocks, getattr(whole, name))
            assert torch.equal(getattr(rankings[-1], name), expected_QCK)

    mass_SK = torch.stack([ranking.mass_SK for ranking in rankings]).sum(0)
    torch.testing.assert_close(mass_SK, whole.mass_SK, rtol=1e-6, atol=1e-6)
    curves_SK = selector.coverage(dataclasses.replace(rankings[0], mass_SK=mass_SK))
    torch.testing.assert_close(curves_SK, selector.coverage(whole), rtol=0, atol=2**-23)
    budgets_S = torch.tensor([2, 4, 3, 1])
    counts_QC = selector.select(whole, budgets_S).counts_QC
    for blocks, ranking in zip(members, rankings, strict=True):
        selection = selector.select(ranking, budgets_S)
        expected_QC = counts_QC[blocks]
        if selector.by_token:
            _, expected_QC = _sequence_of(layout, blocks, counts_QC)
        assert torch.equal(selection.counts_QC, expected_QC)
        if selection.columns is not None:
            columns = selector.select(whole, budgets_S).columns
            assert torch.equal(selection.columns.tokens_NGK, columns.tokens_NGK[blocks])
            assert torch.equal(selection.columns.counts_NG, columns.counts_NG[blocks])
        assert selection.own_block_N.tolist() == blocks


def test_last_queries_must_lie_here() -> None:
    layout = packed_layout(CU_SEQLENS, BLOCK, "cpu")
    q_THD, k_TGD = _inputs()
    selector = selector_named("vertical-slash-last-queries")
    local_layout, local_q_THD = _sequence_of(layout, [3, 4], q_THD)
    rows = LayoutPair.of_blocks(local_layout, layout, [3, 4])
    with pytest.raises(ValueError, match="the last queries of every document"):
        selector.rank(local_q_THD, selector.summaries(q_THD, k_TGD, layout), rows, **OPTIONS)


@pytest.mark.parametrize("own_blocks", [[0, 1], [0, 1, 99], [-1, 1, 2], [0, 1, 2]])
def test_wrong_own_blocks_are_named(own_blocks: list[int]) -> None:
    layout = packed_layout(CU_SEQLENS, BLOCK, "cpu")
    local = packed_layout([0, 8, 16, 24], BLOCK, "cpu")
    with pytest.raises(ValueError, match="own_blocks"):
        LayoutPair.of_blocks(local, layout, own_blocks)
