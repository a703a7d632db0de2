# SPDX-License-Identifier: Apache-2.0
"""The router's kernels against its torch path, in Triton's interpreter or on a GPU.

Inputs are small integers, so that every score is exact in whatever order it is summed.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.row_pair import RowPair
from sparsebalance_megatron.attention.selectors import SELECTORS
from sparsebalance_megatron.attention.selectors.block_topk import BlockTopK
from sparsebalance_megatron.attention.selectors.streaming import rank_in_chunks
from sparsebalance_megatron.attention.selectors.summaries import block_means

triton = pytest.importorskip("triton")
from sparsebalance_megatron.attention.selectors import router_kernels  # noqa: E402

BLOCK = 8
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def _integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(DEVICE, dtype)


def _both(
    selection: str, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout, **options: object
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    selector, rows = SELECTORS[selection], RowPair.within(layout)
    assert isinstance(selector, BlockTopK)
    summaries = selector.summaries(q_THD, k_TGD, layout)
    arguments = (selector._askers(q_THD, summaries, rows), summaries.keys_NGD, rows)
    kernel, plain = (
        rank(*arguments, by_token=selector.by_token, softmax_scale=0.02, **options)
        for rank in (router_kernels.rank_in_kernels, rank_in_chunks)
    )
    return kernel, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cu_seqlens", [[0, 61], [0, 1, 20, 51, 59]])
def test_means_are_the_same(cu_seqlens: list[int], dtype: torch.dtype) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, DEVICE)
    x_THD = _integers((layout.tokens, 3, 20), 0, dtype)
    found = router_kernels.pooled_means(x_THD[:, 1:], layout)
    assert torch.equal(found, block_means(x_THD[:, 1:], layout))


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(
    ("cu_seqlens", "places", "dtype"),
    [([0, 53], 3, torch.float32), ([0, 21, 29, 70, 71], 17, torch.bfloat16)],
)
@pytest.mark.parametrize("selection", ["token-kv-head", "token-query-head", "previous-block"])
def test_lists_and_mass_are_those_of_torch(
    selection: str, cu_seqlens: list[int], places: int, dtype: torch.dtype, observe: bool
) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, DEVICE)
    q_THD = _integers((layout.tokens, 4, 16), 1, dtype)
    k_TGD = _integers((layout.tokens, 2, 16), 2, dtype)
    places = min(places, layout.max_blocks)
    kernel, plain = _both(selection, q_THD, k_TGD, layout, places=places, observe=observe)
    assert torch.equal(kernel[0], plain[0])
    if observe:
        torch.testing.assert_close(kernel[1], plain[1], rtol=1e-6, atol=1e-6)


def test_lists_longer_than_a_tile_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_kernels, "COLUMNS", 16)
    layout = packed_layout([0, 40 * BLOCK], BLOCK, DEVICE)
    q_THD = _integers((layout.tokens, 2, 16), 3, torch.float32)
    k_TGD = _integers((layout.tokens, 1, 16), 4, torch.float32)
    kernel, plain = _both("previous-block", q_THD, k_TGD, layout, places=40, observe=True)
    assert torch.equal(kernel[0], plain[0])
    torch.testing.assert_close(kernel[1], plain[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("selection", ["token-kv-head", "first-query"])
def test_bad_numbers_are_ranked_as_in_torch(selection: str, value: float) -> None:
    layout = packed_layout([0, 13, 66, 77], BLOCK, DEVICE)
    q_THD = _integers((77, 4, 16), 5, torch.float32)
    k_TGD = _integers((77, 2, 16), 6, torch.float32)
    for x, token in itertools.product((q_THD, k_TGD), (25, 41)):
        x[token, 0, 3] = value
    kernel, plain = _both(selection, q_THD, k_TGD, layout, places=7, observe=True)
    assert torch.equal(kernel[0], plain[0])
    torch.testing.assert_close(kernel[1], plain[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert plain[1][1].isnan().all()
    assert plain[1][[0, 2]].isfinite().all()


def test_ties_go_to_the_lower_block() -> None:
    layout = packed_layout([0, 80], BLOCK, DEVICE)
    q_THD, k_TGD = (torch.zeros(80, 1, 16, device=DEVICE) for _ in range(2))
    k_TGD[40:] = -0.0
    kernel, _ = _both("token-kv-head", q_THD, k_TGD, layout, places=4, observe=False)
    assert kernel[0][9 * BLOCK, 0].tolist() == [9, 0, 1, 2]
