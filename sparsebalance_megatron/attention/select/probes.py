# SPDX-License-Identifier: Apache-2.0
"""Attention of a document's probe queries, summed over columns and over diagonals of keys.

A key's column mass is the softmax mass that probes put on it. A block diagonal's mass is what a
later query block will put on one past block if every diagonal of the probes keeps its mass: a
probe's mass at distance d falls into block distances d // B and d // B + 1, in the shares in which
the B queries of a block look there.

Shape legend: G KV heads, D head dim, J blocks of probes, U probes of a block, E query heads of a KV
head, Y keys from a document's first, W blocks from its first, B tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.precision import exact_product


def probed_mass(
    q_JUGED: Tensor,
    position_JU: Tensor,
    k_YGD: Tensor,
    *,
    block_size: int,
    offset_U: Tensor,
    sink_tokens: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from probes to all keys up to themselves, without values.

    Args:
        q_JUGED: the probes.
        position_JU: int64, each probe's place among the keys.
        k_YGD: keys of one document from its first.
        block_size: B.
        offset_U: int64, the places of the probes in a whole block, which diagonals start from.
        sink_tokens: first keys whose mass counts for columns and for no diagonal.
        softmax_scale: factor on q . k.

    Returns:
        float32, each the mean of a block's probes and query heads: columns_JGY, their mass on every
        key; and blocks_JGW, the mass that the block right after theirs is expected to put on every
        block.
    """
    blocks, probes, _, group, _ = q_JUGED.shape
    q_GXD = q_JUGED.float().permute(2, 0, 1, 3, 4).flatten(1, 3)
    k_GDY = k_YGD.float().permute(1, 2, 0)
    scores = exact_product(q_GXD, k_GDY).unflatten(1, (blocks, probes, group))
    keys = k_YGD.shape[0]
    later_JU1Y = torch.arange(keys, device=k_YGD.device) > position_JU[..., None, None]
    scores.mul_(softmax_scale).masked_fill_(later_JU1Y, -torch.inf)
    mass_GJUY = scores.softmax(-1).mean(3)
    columns_JGY = mass_GJUY.mean(2).transpose(0, 1)
    mass_GJUY[..., :sink_tokens] = 0.0
    padded = pad(mass_GJUY, (0, -keys % block_size)).unflatten(3, (-1, block_size))
    mass_GJWX = padded.transpose(2, 3).flatten(3)
    shares_X3 = _shares(offset_U, block_size).flatten(0, 1)
    # The mass on a block goes to it, to the next one and to the one after that.
    shifted_GJW3 = exact_product(mass_GJWX, shares_X3) / probes
    width = shifted_GJW3.shape[2]
    moved = [pad(x_GJW, (n, 0))[..., :width] for n, x_GJW in enumerate(shifted_GJW3.unbind(-1))]
    return columns_JGY, torch.stack(moved).sum(0).transpose(0, 1)


def _shares(offset_U: Tensor, block_size: int) -> Tensor:
    """float32 [U, B, 3]: how a probe's mass on a block's place is shared between shifts 0 to 2."""
    ahead_UB = offset_U[:, None] - torch.arange(block_size, device=offset_U.device)
    least, most = ahead_UB.clamp(min=0), ahead_UB.clamp(max=0).neg()
    shares_UB3 = torch.stack((least, block_size - ahead_UB.abs(), most), -1)
    return shares_UB3.float() / block_size
