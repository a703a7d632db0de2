# SPDX-License-Identifier: Apache-2.0
"""Peaks of far attention against their definition."""

from __future__ import annotations

import pytest
import torch

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.peaks import PeakHistograms, far_peaks

BLOCK, HEADS, KV_HEADS, DIM, SCALE = 4, 4, 2, 8, 0.4


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(
        2.0 * torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS)
    )


def _naive_peak(q_THD: torch.Tensor, k_TGD: torch.Tensor, row: int, head: int) -> float:
    keys = k_TGD[: row + 1, head * KV_HEADS // HEADS].double()
    mass = (keys @ q_THD[row, head].double() * SCALE).softmax(0)
    far = range(1, row // BLOCK - 1)
    return max(float(mass[block * BLOCK : (block + 1) * BLOCK].sum()) for block in far)


@pytest.mark.parametrize("tokens", [13, 16, 37])
def test_a_peak_is_the_greatest_mass_on_one_far_block(tokens: int) -> None:
    q_THD, k_TGD = _inputs(tokens)
    row_Y = torch.arange(3 * BLOCK, tokens)
    found_GYE = far_peaks(q_THD[row_Y], k_TGD, row_Y, block_size=BLOCK, softmax_scale=SCALE)
    found = found_GYE.transpose(0, 1).flatten(1)
    expected = [[_naive_peak(q_THD, k_TGD, int(row), h) for h in range(HEADS)] for row in row_Y]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_documents_and_heads_add_up_and_short_documents_have_no_peaks() -> None:
    q_THD, k_TGD = _inputs(70)
    cu_seqlens = [0, 12, 50, 70]
    whole = PeakHistograms(3, torch.device("cpu"))
    layout = packed_layout(cu_seqlens, BLOCK, "cpu")
    whole.add(1, q_THD, k_TGD, layout, softmax_scale=SCALE)
    parts = PeakHistograms(3, torch.device("cpu"))
    for begin, end in ((12, 50), (50, 70)):
        alone = packed_layout([0, end - begin], BLOCK, "cpu")
        for head in range(KV_HEADS):
            queries = q_THD[begin:end, 2 * head : 2 * head + 2]
            parts.add(1, queries, k_TGD[begin:end, head : head + 1], alone, softmax_scale=SCALE)
    assert torch.equal(whole.counts_LX, parts.counts_LX)
    assert whole.counts_LX[1].sum() == (38 - 12 + 20 - 12) * HEADS
    assert whole.quantile_L(0.99)[::2] == [0.0, 0.0]


def test_a_quantile_is_exact_to_the_width_of_a_bin() -> None:
    q_THD, k_TGD = _inputs(200)
    peaks = PeakHistograms(1, torch.device("cpu"))
    peaks.add(0, q_THD, k_TGD, packed_layout([0, 200], BLOCK, "cpu"), softmax_scale=SCALE)
    row_Y = torch.arange(3 * BLOCK, 200)
    all_peaks = far_peaks(q_THD[row_Y], k_TGD, row_Y, block_size=BLOCK, softmax_scale=SCALE)
    for share in (0.5, 0.99):
        exact = float(all_peaks.flatten().quantile(share))
        assert peaks.quantile_L(share)[0] == pytest.approx(exact, abs=2e-3)
