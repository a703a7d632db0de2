# SPDX-License-Identifier: Apache-2.0
"""How much attention goes to far tokens that the text repeats: which layers look things up.

A query *matches* where it attends to earlier tokens that are its own token, and *copies* where it
attends to those that are the next one. Far tokens lie neither in the query's own block, nor in the
one before, nor in its document's first. Heads that match and heads that copy carry look-ups
(research/pretrained.md). Only repetitions that a document has once or twice far away count:
frequent tokens say nothing.

Shape legend: Y rows that are looked at, X rows and query heads of a KV head, A kinds: matching,
copying.
"""

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import exact_product
from sparsebalance_megatron.attention.layout import PackedLayout

_ROWS_OF_A_DOCUMENT = 1024
_RARE = 2
"""Most far tokens that are alike."""
_SCORES_AT_ONCE = 1 << 26
_READ_ANYWAY_BLOCKS = 3
"""The first block, the block before the own one, and that: earlier queries have no other block."""


class Repetitions:
    """Attention to far repetitions, by layer and head of the whole model; that of ranks adds up.

    Attributes:
        tokens_T: of the packed sequence that runs next; None where nothing is to be added.
        mass_ALH: float64, summed over queries that have repetitions.
        queries_ALH: float64, how many there were.
    """

    tokens_T: Tensor | None

    def __init__(self, layers: int, heads: int, device: torch.device) -> None:
        self.mass_ALH = torch.zeros(2, layers, heads, dtype=torch.float64, device=device)
        self.queries_ALH = torch.zeros_like(self.mass_ALH)

    @torch.no_grad()
    def add(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        layout: PackedLayout,
        *,
        softmax_scale: float,
        first_head: int = 0,
    ) -> None:
        """Look at up to 1,024 evenly spaced queries of every document, of heads from
        ``first_head`` of the model on."""
        if self.tokens_T is None:
            return
        heads = slice(first_head, first_head + q_THD.shape[1])
        for begin, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False):
            first = _READ_ANYWAY_BLOCKS * layout.block_size
            if end - begin <= first:
                continue
            rows = min(_ROWS_OF_A_DOCUMENT, end - begin - first)
            row_Y = torch.linspace(first, end - begin - 1, rows, device=q_THD.device).long()
            at_once = max(1, _SCORES_AT_ONCE // (q_THD.shape[1] * (end - begin)))
            for chunk_Y in row_Y.split(at_once):
                repeated_AYT = far_repetitions(
                    self.tokens_T[begin:end], chunk_Y, block_size=layout.block_size
                )
                has_AY = repeated_AYT.any(-1)
                some_Y = has_AY.any(0)
                mass_YHT = attention_mass(
                    q_THD[begin + chunk_Y[some_Y]],
                    k_TGD[begin:end],
                    chunk_Y[some_Y],
                    softmax_scale=softmax_scale,
                )
                repeated = repeated_AYT[:, some_Y].to(mass_YHT.dtype)
                self.mass_ALH[:, layer, heads] += torch.einsum("yht,ayt->ah", mass_YHT, repeated)
                self.queries_ALH[:, layer, heads] += has_AY.sum(1, keepdim=True)

    def sensitivity_L(self) -> list[float]:
        """0 to 1: the mean mass of a layer's best head over that of the best layer's, of matching
        or of copying, whichever is more."""
        mean_AL = (self.mass_ALH / self.queries_ALH.clamp(min=1.0)).amax(-1)
        most_A = mean_AL.amax(1)
        share_AL = mean_AL / most_A.where(most_A > 0.0, 1.0)[:, None]
        return [float(share) for share in share_AL.amax(0)]


def far_repetitions(tokens_T: Tensor, row_Y: Tensor, *, block_size: int) -> Tensor:
    """bool [A, Y, T]: the far tokens of a document that its queries may match, and copy; none where
    there are more than two."""
    place_T, own_Y1 = torch.arange(len(tokens_T), device=row_Y.device), row_Y[:, None]
    far_YT = (place_T >= block_size) & (place_T // block_size < own_Y1 // block_size - 1)
    next_T = torch.cat([tokens_T[1:], tokens_T.new_full((1,), -1)])
    asked_AY = torch.stack([tokens_T[row_Y], next_T[row_Y]])
    repeated_AYT = (tokens_T == asked_AY[..., None]) & far_YT
    return repeated_AYT & (repeated_AYT.sum(-1, keepdim=True) <= _RARE)


def copies_T(tokens_T: np.ndarray, *, block_size: int) -> np.ndarray:
    """bool: the tokens of a document after which comes what followed the same two far away."""
    earliest: dict[tuple[int, ...], int] = {}
    copies_T = np.zeros(len(tokens_T), dtype=bool)
    for row in range(max(block_size - 1, 1), len(tokens_T) - 1):
        first = earliest.setdefault(tuple(tokens_T[row - 1 : row + 2].tolist()), row + 1)
        copies_T[row] = first // block_size < row // block_size - 1
    return copies_T


def attention_mass(q_YHD: Tensor, k_TGD: Tensor, row_Y: Tensor, *, softmax_scale: float) -> Tensor:
    """[Y, H, T]: softmax mass that some queries of a document put on its tokens."""
    tokens, kv_heads, _ = k_TGD.shape
    group = q_YHD.shape[1] // kv_heads
    q_GXD = q_YHD.float().unflatten(1, (kv_heads, group)).transpose(0, 1).flatten(1, 2)
    scores = exact_product(q_GXD, k_TGD.float().permute(1, 2, 0)).mul_(softmax_scale)
    scores_GYHT = scores.unflatten(1, (len(row_Y), group))
    later_YT = torch.arange(tokens, device=row_Y.device) > row_Y[:, None]
    mass_GYHT = scores_GYHT.masked_fill_(later_YT[:, None], -torch.inf).softmax(-1)
    return mass_GYHT.transpose(0, 1).flatten(1, 2)
