# SPDX-License-Identifier: Apache-2.0
"""Bytes that selection holds at its peak, by torch's router, on tensors that take no memory."""

import pytest
import torch
from fake_cuda import CUDA, PeakMemory, fake_cuda

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named


@pytest.mark.parametrize(
    ("selection", "tokens", "heads"),
    [
        ("previous-block", 128 * 1024, 16),
        *(
            (selection, *size)
            for selection in ("token-kv-head", "token-query-head")
            for size in ((8192, 2), (32768, 2), (8192, 8))
        ),
    ],
)
def test_lists_are_held_and_scores_are_not(selection: str, tokens: int, heads: int) -> None:
    """At budget 32, every head its own KV head: 400 bytes for each token and head, less than the
    scores of 128 blocks, make less than 1 GB of 128K tokens and 16 heads."""
    selector = selector_named(selection, "torch")
    with fake_cuda():
        layout = packed_layout([0, tokens // 3, tokens], 256, CUDA)
        how = {"dtype": torch.bfloat16, "device": CUDA}
        qk = [torch.empty(tokens, heads, 128, **how) for _ in range(2)]
        with PeakMemory(before=(*qk, *vars(layout).values())) as live:
            ranking = rank_sequence(
                selector, *qk, layout, softmax_scale=1.0, max_budget=32, observe=True
            )
            selector.coverage(ranking)
            selector.select(ranking, torch.full((2,), 32, device=CUDA))
    per_token_and_head = 400 if selector.by_token else 20
    assert live.most <= 4_000_000 + per_token_and_head * tokens * heads
