# SPDX-License-Identifier: Apache-2.0
"""Peaks of far attention: how much of a query's attention one distant block takes.

A query's peak is the greatest softmax mass that it puts on one block which is neither its own, nor
the one before, nor its document's first. Layers that look single facts up have high peaks in a few
rows and heads; how much mass lies far away in all does not tell them apart
(research/pretrained.md).

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, L layers,
X bins of a histogram, Y rows that are looked at, E query heads of a KV head, N blocks and B tokens
of a block of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.precision import exact_product

_BINS = 1000
_ROWS_OF_A_DOCUMENT = 256
_SCORES_AT_ONCE = 1 << 26
_READ_ANYWAY_BLOCKS = 3
"""The first block, the block before the own one, and that: earlier queries have no other block."""


class PeakHistograms:
    """Histograms of the peaks of all layers; those of ranks with other heads, documents or layers
    add up.

    Attributes:
        counts_LX: int64, rows and heads whose peak lies in each of equal bins of [0, 1].
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.counts_LX = torch.zeros(layers, _BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        layout: PackedLayout,
        *,
        softmax_scale: float,
    ) -> None:
        """Count the peaks of up to 256 evenly spaced queries of every document."""
        for begin, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False):
            first = _READ_ANYWAY_BLOCKS * layout.block_size
            if end - begin <= first:
                continue
            rows = min(_ROWS_OF_A_DOCUMENT, end - begin - first)
            row_Y = torch.linspace(first, end - begin - 1, rows, device=q_THD.device).long()
            at_once = max(1, _SCORES_AT_ONCE // (q_THD.shape[1] * (end - begin)))
            for chunk_Y in row_Y.split(at_once):
                peaks_GYE = far_peaks(
                    q_THD[begin + chunk_Y],
                    k_TGD[begin:end],
                    chunk_Y,
                    block_size=layout.block_size,
                    softmax_scale=softmax_scale,
                )
                bins = (peaks_GYE.flatten() * _BINS).long().clamp_(0, _BINS - 1)
                self.counts_LX[layer] += torch.bincount(bins, minlength=_BINS)

    def quantile_L(self, share: float) -> list[float]:
        """The peak that a share of a layer's rows and heads do not exceed, to the width of a bin;
        0 where a layer has seen none."""
        below_LX = self.counts_LX.cumsum(1)
        wanted_L1 = share * below_LX[:, -1:]
        bin_L = (below_LX < wanted_L1).sum(1)
        seen_L = below_LX[:, -1] > 0
        return torch.where(seen_L, (bin_L + 0.5) / _BINS, 0.0).tolist()


def far_peaks(
    q_YHD: Tensor, k_TGD: Tensor, row_Y: Tensor, *, block_size: int, softmax_scale: float
) -> Tensor:
    """[G, Y, E]: peaks of some queries of one document.

    Args:
        q_YHD: the queries.
        k_TGD: the document's keys from its first token.
        row_Y: int64, places of the queries in the document.
    """
    tokens, kv_heads, _ = k_TGD.shape
    q_GXD = q_YHD.float().unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    scores = exact_product(q_GXD, k_TGD.float().permute(1, 2, 0)).mul_(softmax_scale)
    scores_GYET = scores.unflatten(1, (len(row_Y), -1))
    later_YT = torch.arange(tokens, device=row_Y.device) > row_Y[:, None]
    mass_GYET = scores_GYET.masked_fill_(later_YT[:, None], -torch.inf).softmax(-1)
    padded = pad(mass_GYET, (0, -tokens % block_size))
    mass_GYEN = padded.unflatten(-1, (-1, block_size)).sum(-1)
    block_N, own_Y1 = torch.arange(mass_GYEN.shape[-1], device=row_Y.device), row_Y[:, None]
    own_Y1 = own_Y1 // block_size
    read_YN = (block_N == 0) | (block_N >= own_Y1 - 1)
    return mass_GYEN.masked_fill_(read_YN[:, None], 0.0).amax(-1)
