# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What the attention kernels share: loads, a step of each product, stores, constants.

Shape legend: T tokens of the packed sequence, D head dim; in kernels Y query rows of
a tile, C columns (keys) of a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.index import InverseLists, inverse_lists
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

WANTED_PROGRAMS = 512
"""Programs that fill a device of 132 multiprocessors a few times over."""
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
PART_BYTES = 512 << 20
"""Most bytes of the results of items of cut lists."""
_LARGEST_ROW_STRIDE = 1 << 23


def with_dense_rows(x: Tensor) -> Tensor:
    """Give the same values with neighbouring head dims in neighbouring places.

    Rows keep a distance whose multiple within a tile takes 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(0) < _LARGEST_ROW_STRIDE else x.contiguous()


def row_strides(*xs_THD: Tensor) -> list[int]:
    """Distances between tokens and between heads, tensor by tensor."""
    return [stride for x in xs_THD for stride in x.stride()[:2]]


def tile_constants(x: Tensor, block_size: int, rows: int, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments that all kernels share; none depends on tokens or budgets."""
    return {
        "HEAD_DIM": x.shape[-1],
        "BLOCK_D": max(16, triton.next_power_of_2(x.shape[-1])),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": rows,
        "TILE_COLUMNS": min(tile.columns, block_size),
        # Float32 means float32: its users are tests. Ignored for the half types.
        "PRECISION": "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


@triton.jit
def load_rows(
    pointer_YD, row_stride, row_Y, valid_Y, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_D] of a matrix; zeros where invalid and past the head dim.

    In a loop, let the pointer move and the rows stand still: then addresses cost one addition.
    """
    dim_D = tl.arange(0, BLOCK_D)
    address_YD = pointer_YD + row_Y[:, None] * row_stride + dim_D[None, :]
    if MASKED:
        return tl.load(address_YD, mask=valid_Y[:, None] & (dim_D < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(address_YD, mask=(dim_D < HEAD_DIM)[None, :], other=0.0)
    return tl.load(address_YD)


@triton.jit
def block_extent(starts, ends, block, BLOCK_SIZE: tl.constexpr):
    """A block's first token (int64) and its tokens (int32)."""
    start = tl.load(starts + block)
    length = tl.minimum(tl.load(ends + block) - start, BLOCK_SIZE).to(tl.int32)
    return start, length


@triton.jit
def entry_at(entries, place, count):
    """An entry of a list; 0 past its end.

    Loops load the entry of their next turn. Were it loaded in the turn that needs it, tiles could
    not be copied ahead of it, and the copy would be waited for right after it was started.
    """
    return tl.load(entries + place, mask=place < count, other=0)


@triton.jit
def query_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, visible_YC, dq_YD, score_scale,
               MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of keys gives to dq / softmax_scale."""
    s_YC = tl.dot(q_YD, tl.trans(k_CD), input_precision=PRECISION) * score_scale
    p_YC = tl.exp2(s_YC - lse_Y[:, None])
    if MASKED:
        p_YC = tl.where(visible_YC, p_YC, 0.0)
    dp_YC = tl.dot(dout_YD, tl.trans(v_CD), input_precision=PRECISION)
    ds_YC = p_YC * (dp_YC - delta_Y[:, None])
    return tl.dot(ds_YC.to(k_CD.dtype), k_CD, dq_YD, input_precision=PRECISION)


@triton.jit
def key_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, slot_C, slot_Y, dk_CD, dv_CD, score_scale,
             MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of queries gives to dk / softmax_scale and dv; probabilities lie
    transposed. Rows whose q, dout and delta are 0 add nothing."""
    s_CY = tl.dot(k_CD, tl.trans(q_YD), input_precision=PRECISION) * score_scale
    p_CY = tl.exp2(s_CY - lse_Y[None, :])
    if MASKED:
        p_CY = tl.where(slot_C[:, None] <= slot_Y[None, :], p_CY, 0.0)
    dv_CD = tl.dot(p_CY.to(dout_YD.dtype), dout_YD, dv_CD, input_precision=PRECISION)
    dp_CY = tl.dot(v_CD, tl.trans(dout_YD), input_precision=PRECISION)
    ds_CY = p_CY * (dp_CY - delta_Y[None, :])
    dk_CD = tl.dot(ds_CY.to(q_YD.dtype), q_YD, dk_CD, input_precision=PRECISION)
    return dk_CD, dv_CD


@triton.jit
def query_block_step(q, dout, statistics, k_CD, v_CD, slot_C, dk_CD, dv_CD,
                     q_stride_T, q_stride_H, dout_stride_T, dout_stride_H, score_scale,
                     first_token, first_slot, readers_end, head, query_block, query_blocks,
                     MASKED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                     BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of a query block's rows, of one head, gives to dk and dv."""
    slot_Y = first_slot + tl.arange(0, TILE_ROWS)
    token_Y = first_token + slot_Y
    # Past the last reader's end q, dout and delta are 0.
    valid_Y = slot_Y < (readers_end - first_token).to(tl.int32)
    head = head.to(tl.int64)
    q_YD = load_rows(q + head * q_stride_H, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    dout_YD = load_rows(dout + head * dout_stride_H, dout_stride_T, token_Y, valid_Y, True,
                        HEAD_DIM, BLOCK_D)  # fmt: skip
    lse = statistics + (head * query_blocks + query_block) * BLOCK_SIZE
    lse_Y = tl.load(lse + slot_Y)
    delta_Y = tl.load(lse + HEADS * query_blocks.to(tl.int64) * BLOCK_SIZE + slot_Y)
    return key_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, slot_C, slot_Y, dk_CD, dv_CD,
                    score_scale, MASKED, PRECISION)  # fmt: skip


@triton.jit
def store_key_gradients(
    dk, dv, parts, dk_CD, dv_CD, token_C, slot_C, valid_C, kv_head, kv_heads, part,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of [T, KV heads, D]; those of an item of a cut list go to its part."""
    dim_D = tl.arange(0, BLOCK_D)
    stored_CD = valid_C[:, None] & (dim_D < HEAD_DIM)[None, :]
    if part >= 0:
        row_C = part.to(tl.int64) * (2 * BLOCK_SIZE) + slot_C
        place_CD = row_C[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(parts + place_CD, dk_CD, mask=stored_CD)
        tl.store(parts + place_CD + BLOCK_SIZE * HEAD_DIM, dv_CD, mask=stored_CD)
    else:
        place_CD = (token_C * kv_heads + kv_head)[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(dk + place_CD, dk_CD.to(dk.dtype.element_ty), mask=stored_CD)
        tl.store(dv + place_CD, dv_CD.to(dv.dtype.element_ty), mask=stored_CD)


def lists_for(
    selection: Selection, kv_heads: int, head_dim: int, column_tiles: int
) -> InverseLists:
    """Inverse lists whose items fill a device, each shared by ``column_tiles`` programs."""
    part_bytes = 8 * selection.kv_layout.block_size * head_dim
    return inverse_lists(
        selection,
        kv_heads,
        wanted_items=-(-WANTED_PROGRAMS // column_tiles),
        most_cut_items=PART_BYTES // part_bytes,
    )


def parts_of(lists: InverseLists, dk_TGD: Tensor, layout: PackedLayout) -> Tensor:
    """Uninitialised results of the items of cut lists, parts_I2BD."""
    shape = lists.cut_items, 2, layout.block_size, dk_TGD.shape[2]
    return torch.empty(shape, dtype=torch.float32, device=dk_TGD.device)


def add_parts(
    lists: InverseLists, parts_I2BD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor, layout: PackedLayout
) -> None:
    """Second pass over lists that were cut: store the sums of their parts."""
    if not lists.cut_items:
        return
    (_, kv_heads, head_dim), rows = dk_TGD.shape, min(32, layout.block_size)
    _add_parts_kernel[kv_heads * layout.blocks, layout.block_size // rows](
        *(parts_I2BD, dk_TGD, dv_TGD, lists.parts_U, lists.first_slot_U, layout.start_N),
        *(layout.blocks, kv_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=layout.block_size,
        ROWS=rows,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["blocks", "kv_heads"])
def _add_parts_kernel(
    parts, dk, dv, part_counts, first_slots, starts, blocks, kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of cut lists have later readers, hence are full."""
    inverse_list = tl.program_id(0)
    count = tl.load(part_counts + inverse_list)
    if count <= 1:
        return
    first_part = tl.load(first_slots + inverse_list).to(tl.int64)
    slot_C = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim_D = tl.arange(0, BLOCK_D)
    inside_CD = (slot_C >= 0)[:, None] & (dim_D < HEAD_DIM)[None, :]
    dk_CD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_CD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(0, count):
        row_C = (first_part + part) * (2 * BLOCK_SIZE) + slot_C
        place_CD = row_C[:, None] * HEAD_DIM + dim_D[None, :]
        dk_CD += tl.load(parts + place_CD, mask=inside_CD, other=0.0)
        dv_CD += tl.load(parts + place_CD + BLOCK_SIZE * HEAD_DIM, mask=inside_CD, other=0.0)
    token_C = tl.load(starts + inverse_list % blocks) + slot_C
    place_CD = (token_C * kv_heads + inverse_list // blocks)[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(dk + place_CD, dk_CD.to(dk.dtype.element_ty), mask=inside_CD)
    tl.store(dv + place_CD, dv_CD.to(dv.dtype.element_ty), mask=inside_CD)
