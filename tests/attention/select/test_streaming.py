# SPDX-License-Identifier: Apache-2.0
"""Bytes that selection holds at its peak: counted on small rows, extrapolated to 128K tokens."""

import gc

import pytest
import torch
from fake_cuda import PeakMemory

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named, streaming
from sparsebalance_megatron.attention.select import summaries as summaries_of_blocks

BLOCK, HEAD_DIM = 256, 16
LARGE_TOKENS, LARGE_HEADS, LARGE_HEAD_DIM, LARGE_BUDGET = 128 * 1024, 16, 128, 32


def _peak_bytes(selection: str, tokens: int, heads: int, budget: int) -> int:
    """Peak bytes of selecting for one sequence, every head its own KV head, above those before."""
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).bfloat16() for _ in range(2)
    )
    layout = packed_layout([0, tokens // 3, tokens], BLOCK, "cpu")
    selector = selector_named(selection)
    gc.collect()
    with PeakMemory("cpu", (q_THD, k_TGD, *vars(layout).values())) as live:
        ranking = rank_sequence(
            selector, q_THD, k_TGD, layout, softmax_scale=1.0, max_budget=budget, observe=True
        )
        selector.coverage(ranking)
        selector.select(ranking, torch.full((2,), budget))
    return live.most


def _bound_bytes(selection: str, tokens: int, heads: int, head_dim: int, budget: int) -> int:
    """What may be held: kept tensors, by shape, and what one chunk takes, which is constant."""
    blocks = -(-tokens // BLOCK) + 1
    rows = tokens if selector_named(selection).by_token else blocks
    lists = rows * heads * (4 * budget + 2 * 4)
    row_tensors = rows * 8 * 6
    summaries = 4 * blocks * heads * head_dim * 4
    mass = 2 * blocks * blocks * 8
    chunk = 40 * streaming.SCORES_AT_ONCE
    pooled = 8 * max(summaries_of_blocks._COPIED_ELEMENTS, BLOCK * heads * head_dim)
    return lists + row_tensors + summaries + mass + max(chunk, pooled)


@pytest.mark.parametrize(
    ("selection", "limit_bytes"),
    [
        ("token-query-head", 1_000_000_000),
        ("token-kv-head", 1_000_000_000),
        ("previous-block", 60_000_000),
    ],
)
def test_peaks_follow_the_formula_whose_value_for_long_rows_is_bounded(
    selection: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (LARGE_TOKENS, LARGE_HEADS, LARGE_HEAD_DIM, LARGE_BUDGET)
    assert _bound_bytes(selection, *large) <= limit_bytes
    # Small chunks hide nothing that is kept.
    monkeypatch.setattr(streaming, "SCORES_AT_ONCE", 1 << 10)
    monkeypatch.setattr(summaries_of_blocks, "_COPIED_ELEMENTS", 1 << 10)
    for tokens, heads, budget in ((2048, 2, 2), (8192, 2, 4), (4096, 8, 8)):
        bound = _bound_bytes(selection, tokens, heads, HEAD_DIM, budget)
        assert _peak_bytes(selection, tokens, heads, budget) <= bound
