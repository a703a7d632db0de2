# SPDX-License-Identifier: Apache-2.0
"""torch's compiled FlexAttention with a block mask made from the selection: a cross-check on CUDA.

The row is padded to whole blocks, own blocks become partial blocks under a causal mask, past blocks
full ones. The mask's buffers are quadratic in the number of blocks, and a new number of blocks may
compile anew.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, N blocks of
the row, B tokens of a block, K places of a list.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

# Torch 2.9 renamed the argument that asks for the LSE.
_WITH_LSE = (
    {"return_aux": flex.AuxRequest(lse=True)}
    if hasattr(flex, "AuxRequest")
    else {"return_lse": True}
)


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by query block, of queries and keys in one row, on CUDA.

    Blocks must hold a multiple of 128 tokens.
    """
    layout = selection.query_layout
    group = q_THD.shape[1] // k_TGD.shape[1]
    q, k, v = (_padded(x, layout) for x in (q_THD, k_TGD, v_TGD))
    out, statistics = compiled_flex_attention()(
        q,
        k,
        v,
        block_mask=block_mask(selection, group),
        scale=softmax_scale,
        enable_gqa=group > 1,
        **_WITH_LSE,
    )
    lse = getattr(statistics, "lse", statistics)
    out_THD = layout.from_blocks(_blocks(out[0].transpose(0, 1), layout))
    lse_TH = layout.from_blocks(_blocks(lse[0].transpose(0, 1), layout))
    return out_THD, lse_TH.detach().float()


def block_mask(selection: Selection, group: int) -> BlockMask:
    """The selection on a row padded to whole blocks, for ``group`` query heads per KV head."""
    indices_NGK, counts_NG = selection.indices_QCK, selection.counts_QC
    blocks, kv_heads, width = indices_NGK.shape
    block_N1 = torch.arange(blocks, device=indices_NGK.device)[:, None]
    own_NG = ((counts_NG > 0) & (indices_NGK[..., 0] == block_N1)).int()
    # FlexAttention wants lists as wide as there are blocks; their tails are not read.
    own_NGN = torch.zeros(blocks, kv_heads, blocks, dtype=torch.int32, device=indices_NGK.device)
    own_NGN[..., 0] = block_N1
    past_NGN = torch.zeros_like(own_NGN)
    place_K = torch.arange(width, device=indices_NGK.device)
    past_NGK = indices_NGK.gather(2, (place_K + own_NG[..., None]).clamp(max=width - 1))
    past_NGN[..., :width] = past_NGK.clamp(min=0)

    def per_query_head(x_NG: Tensor) -> Tensor:
        return x_NG.transpose(0, 1).repeat_interleave(group, 0)[None].contiguous()

    size = selection.query_layout.block_tokens
    return BlockMask.from_kv_blocks(
        per_query_head(own_NG),
        per_query_head(own_NGN),
        per_query_head(counts_NG - own_NG),
        per_query_head(past_NGN),
        BLOCK_SIZE=(size, size),
        mask_mod=_causal,
        seq_lengths=(blocks * size, blocks * size),
    )


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _padded(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """[1, heads, N * B, D]."""
    return layout.to_blocks(x_THD).flatten(0, 1).transpose(0, 1)[None].contiguous()


def _blocks(x: Tensor, layout: PackedLayout) -> Tensor:
    return x.unflatten(0, (layout.blocks, layout.block_tokens))
