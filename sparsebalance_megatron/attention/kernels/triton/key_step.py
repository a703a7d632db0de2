# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""One step of the kernels for dk and dv of selections by query block.

Shape legend: D head dim; Y query rows of a tile, C columns (keys) of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsebalance_megatron.attention.kernels.triton.forward_kernel import load_rows


@triton.jit
def key_step(q, dout, statistics, k_CD, v_CD, slot_C, dk_CD, dv_CD,
             q_stride_T, q_stride_H, dout_stride_T, dout_stride_H, score_scale,
             first_token, first_slot, readers_end, head, query_block, query_blocks,
             MASKED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
             BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of query rows of one head gives. Probabilities lie transposed."""
    slot_Y = first_slot + tl.arange(0, TILE_ROWS)
    token_Y = first_token + slot_Y
    valid_Y = slot_Y < (readers_end - first_token).to(tl.int32)
    head = head.to(tl.int64)
    q_YD = load_rows(q + head * q_stride_H, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    dout_YD = load_rows(dout + head * dout_stride_H, dout_stride_T, token_Y, valid_Y, True,
                        HEAD_DIM, BLOCK_D)  # fmt: skip
    # Past the last reader's end q, dout and delta are 0, so that such rows add nothing.
    lse = statistics + (head * query_blocks + query_block) * BLOCK_SIZE
    lse_Y = tl.load(lse + slot_Y)
    delta_Y = tl.load(lse + HEADS * query_blocks.to(tl.int64) * BLOCK_SIZE + slot_Y)
    s_CY = tl.dot(k_CD, tl.trans(q_YD), input_precision=PRECISION) * score_scale
    p_CY = tl.exp2(s_CY - lse_Y[None, :])
    if MASKED:
        p_CY = tl.where(slot_C[:, None] <= slot_Y[None, :], p_CY, 0.0)
    dv_CD = tl.dot(p_CY.to(dout_YD.dtype), dout_YD, dv_CD, input_precision=PRECISION)
    dp_CY = tl.dot(v_CD, tl.trans(dout_YD), input_precision=PRECISION)
    ds_CY = p_CY * (dp_CY - delta_Y[None, :])
    dk_CD = tl.dot(ds_CY.to(q_YD.dtype), q_YD, dk_CD, input_precision=PRECISION)
    return dk_CD, dv_CD
