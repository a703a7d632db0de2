# SPDX-License-Identifier: Apache-2.0
"""Bytes that selection holds at its peak: counted on small rows, extrapolated to 128K tokens.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, K places of a
list.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named, streaming
from sparsebalance_megatron.attention.select import summaries as summaries_of_blocks

BLOCK, HEAD_DIM = 256, 16
LARGE_TOKENS, LARGE_HEADS, LARGE_HEAD_DIM, LARGE_BUDGET = 128 * 1024, 16, 128, 32


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return, from their birth to their death."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def died() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, died)


def _peak_bytes(selection: str, tokens: int, heads: int, budget: int) -> int:
    """Peak bytes of selecting for one sequence, every head its own KV head, above those before."""
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).bfloat16() for _ in range(2)
    )
    layout = packed_layout([0, tokens // 3, tokens], BLOCK, "cpu")
    selector = selector_named(selection)
    gc.collect()
    with LiveBytes() as live:
        for x in (q_THD, k_TGD, *vars(layout).values()):
            if isinstance(x, Tensor):
                live._known.add(x.untyped_storage()._cdata)
        ranking = rank_sequence(
            selector, q_THD, k_TGD, layout, softmax_scale=1.0, max_budget=budget, observe=True
        )
        selector.coverage(ranking)
        selector.select(ranking, torch.full((2,), budget))
    return live.peak


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
