# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Means over the tokens of every block: one launch, however many blocks there are.

Shape legend: T tokens of the packed sequence, H query heads or KV heads, D head dim, N blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout

_POOLED_TOKENS = 32


def pooled_means(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """See :func:`..summaries.block_means`, whose means these are to rounding."""
    _, heads, head_dim = x_THD.shape
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    mean_NHD = x_THD.new_empty(layout.blocks, heads, head_dim, dtype=wide)
    with torch.cuda.device_of(x_THD):
        _mean_kernel[layout.blocks, heads](
            x_THD,
            mean_NHD,
            layout.start_N,
            layout.length_N,
            x_THD.stride(0),
            x_THD.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            TOKENS=_POOLED_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return mean_NHD


@triton.jit
def _mean_kernel(
    x_THD, mean_NHD, start_N, length_N, x_stride_T, x_stride_H,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Mean over the tokens of one block, of one head, in the dtype of the means."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, length = tl.load(start_N + block), tl.load(length_N + block).to(tl.int32)
    place_D = tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty)
    for token in range(0, length, TOKENS):
        place_T = token + tl.arange(0, TOKENS)
        x_TD = tl.load(
            x_THD + (begin + place_T)[:, None] * x_stride_T + head * x_stride_H + place_D[None, :],
            mask=(place_T < length)[:, None] & (place_D < HEAD_DIM)[None, :],
            other=0.0,
        )
        sum_D += tl.sum(x_TD.to(mean_NHD.dtype.element_ty), 0)
    tokens_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty) + length
    # Torch's division rounds to nearest; of float32, Triton's own does not.
    if mean_NHD.dtype.element_ty == tl.float32:
        mean_D = tl.div_rn(sum_D, tokens_D)
    else:
        mean_D = sum_D / tokens_D
    row_D = mean_NHD + (block * HEADS + head) * HEAD_DIM + place_D
    tl.store(row_D, mean_D, mask=place_D < HEAD_DIM)
