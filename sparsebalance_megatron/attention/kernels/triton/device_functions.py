# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Device functions of all attention kernels: loads, a step of each product, stores, constants.

Shape legend: E both side by side, I items, B tokens of a block, C columns (keys) of a tile; in
kernels Y query rows of a tile.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.index import (
    InverseLists,
    Readers,
    inverse_lists,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, tiles_of
from sparsebalance_megatron.attention.layout import PackedLayout

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


def tile_constants(
    k_TGD: Tensor, v_TGF: Tensor, block_size: int, rows: int, tile: Tile
) -> dict[str, Any]:
    """Compile-time arguments that all kernels share; none depends on tokens or budgets.

    A head dim that is no power of two is padded with zeros inside a tile.
    """
    return {
        "HEAD_DIM": k_TGD.shape[2],
        "BLOCK_D": max(16, triton.next_power_of_2(k_TGD.shape[2])),
        "VALUE_DIM": v_TGF.shape[2],
        "BLOCK_F": max(16, triton.next_power_of_2(v_TGF.shape[2])),
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

    In a loop, let the pointer move and the rows stand still: addresses then cost one addition.
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
    """An entry of a list, in 32 bits; 0 past its end.

    Lists of blocks have 16 bits, in which a block's first token would overflow.
    Loops load the entry of their next turn. Were it loaded in the turn that needs it, tiles could
    not be copied ahead of it, and the copy would be waited for right after it was started.
    """
    return tl.load(entries + place, mask=place < count, other=0).to(tl.int32)


@triton.jit
def key_step(q_YD, dout_YF, lse_Y, delta_Y, k_CD, v_CF, slot_C, slot_Y, dk_CD, dv_CF, score_scale,
             MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of queries gives to dk / softmax_scale and dv; probabilities lie
    transposed. Rows whose q, dout and delta are 0 add nothing."""
    s_CY = tl.dot(k_CD, tl.trans(q_YD), input_precision=PRECISION) * score_scale
    p_CY = tl.exp2(s_CY - lse_Y[None, :])
    if MASKED:
        p_CY = tl.where(slot_C[:, None] <= slot_Y[None, :], p_CY, 0.0)
    dv_CF = tl.dot(p_CY.to(dout_YF.dtype), dout_YF, dv_CF, input_precision=PRECISION)
    dp_CY = tl.dot(v_CF, tl.trans(dout_YF), input_precision=PRECISION)
    ds_CY = p_CY * (dp_CY - delta_Y[None, :])
    dk_CD = tl.dot(ds_CY.to(q_YD.dtype), q_YD, dk_CD, input_precision=PRECISION)
    return dk_CD, dv_CF


@triton.jit
def query_block_step(q, dout, statistics, k_CD, v_CF, slot_C, dk_CD, dv_CF,
                     q_stride_T, q_stride_H, dout_stride_T, dout_stride_H, score_scale,
                     first_token, first_slot, readers_end, head, query_block, query_blocks,
                     MASKED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                     BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
                     BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of a query block's rows, of one head, gives to dk and dv."""
    slot_Y = first_slot + tl.arange(0, TILE_ROWS)
    token_Y = first_token + slot_Y
    # Past the last reader's end q, dout and delta are 0.
    valid_Y = slot_Y < (readers_end - first_token).to(tl.int32)
    head = head.to(tl.int64)
    q_YD = load_rows(q + head * q_stride_H, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    dout_YF = load_rows(dout + head * dout_stride_H, dout_stride_T, token_Y, valid_Y, True,
                        VALUE_DIM, BLOCK_F)  # fmt: skip
    lse = statistics + (head * query_blocks + query_block) * BLOCK_SIZE
    lse_Y = tl.load(lse + slot_Y)
    delta_Y = tl.load(lse + HEADS * query_blocks.to(tl.int64) * BLOCK_SIZE + slot_Y)
    return key_step(q_YD, dout_YF, lse_Y, delta_Y, k_CD, v_CF, slot_C, slot_Y, dk_CD, dv_CF,
                    score_scale, MASKED, PRECISION)  # fmt: skip


@triton.jit
def store_key_gradients(
    dk, dv, parts, dk_CD, dv_CF, token_C, slot_C, valid_C, kv_head, kv_heads, part,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store dk of [T, KV heads, D] and dv of [T, KV heads, F]; those of an item of a cut list go
    to its part, side by side."""
    dim_D, dim_F = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_F)
    stored_CD = valid_C[:, None] & (dim_D < HEAD_DIM)[None, :]
    stored_CF = valid_C[:, None] & (dim_F < VALUE_DIM)[None, :]
    if part >= 0:
        row_C = (part.to(tl.int64) * BLOCK_SIZE + slot_C) * (HEAD_DIM + VALUE_DIM)
        tl.store(parts + row_C[:, None] + dim_D[None, :], dk_CD, mask=stored_CD)
        tl.store(parts + row_C[:, None] + HEAD_DIM + dim_F[None, :], dv_CF, mask=stored_CF)
    else:
        row_C = token_C * kv_heads + kv_head
        tl.store(dk + row_C[:, None] * HEAD_DIM + dim_D[None, :], dk_CD.to(dk.dtype.element_ty),
                 mask=stored_CD)  # fmt: skip
        tl.store(dv + row_C[:, None] * VALUE_DIM + dim_F[None, :], dv_CF.to(dv.dtype.element_ty),
                 mask=stored_CF)  # fmt: skip


def key_gradients(
    kernel: Any,
    dout_THF: Tensor,
    saved: Saved,
    statistics: Sequence[Tensor],
    own: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Readers]:
    """dk_TGD and dv_TGF in ``dtype``, 0 where no query reads; and the readers of every KV block.

    ``kernel`` takes items of their lists, ``own`` what no other such kernel takes.
    """
    q_THD, k_TGD, v_TGF, selection = saved.q_THD, saved.k_TGD, saved.v_TGF, saved.selection
    layout, kv_heads, device = selection.kv_layout, k_TGD.shape[1], k_TGD.device
    tile, part_dim = tiles_of(k_TGD, v_TGF).key_gradient, k_TGD.shape[2] + v_TGF.shape[2]
    rows = tile.rows if selection.by_token else min(tile.rows, layout.block_size)
    constants = tile_constants(k_TGD, v_TGF, layout.block_size, rows, tile)
    column_tiles = layout.block_size // constants["TILE_COLUMNS"]
    # As many items as fill a device, each shared by the programs of a block's tiles.
    lists = inverse_lists(
        selection,
        kv_heads,
        wanted_items=-(-WANTED_PROGRAMS // column_tiles),
        most_cut_items=PART_BYTES // (4 * layout.block_size * part_dim),
    )
    dk_TGD, dv_TGF = (torch.empty(x.shape, dtype=dtype, device=device) for x in (k_TGD, v_TGF))
    shape = lists.cut_items, layout.block_size, part_dim
    parts_IBE = torch.empty(shape, dtype=torch.float32, device=device)
    kernel[(lists.item_3I.shape[1] * column_tiles,)](
        *(q_THD, k_TGD, v_TGF, dout_THF, *statistics, dk_TGD, dv_TGF, parts_IBE),
        *(lists.entries.bounds_J, lists.entries.readers_E, *lists.item_3I, selection.own_block_N),
        *(selection.query_layout.start_N, layout.start_N, layout.document_end_N),
        *row_strides(q_THD, k_TGD, v_TGF, dout_THF),
        *(saved.softmax_scale, layout.blocks, lists.entries_per_item, lists.entries.tiles),
        KV_HEADS=kv_heads,
        GROUP=q_THD.shape[1] // kv_heads,
        **own,
        **constants,
    )
    _add_parts(lists, parts_IBE, dk_TGD, dv_TGF, layout)
    return dk_TGD, dv_TGF, lists.entries


def _add_parts(
    lists: InverseLists, parts_IBE: Tensor, dk_TGD: Tensor, dv_TGF: Tensor, layout: PackedLayout
) -> None:
    """Second pass over lists that were cut: store the sums of their parts."""
    if not lists.cut_items:
        return
    (_, kv_heads, head_dim), value_dim = dk_TGD.shape, dv_TGF.shape[2]
    rows = min(32, layout.block_size)
    _add_parts_kernel[kv_heads * layout.blocks, layout.block_size // rows](
        *(parts_IBE, dk_TGD, dv_TGF, *lists.list_2U, layout.start_N),
        *(layout.blocks, kv_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        VALUE_DIM=value_dim,
        BLOCK_F=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=layout.block_size,
        ROWS=rows,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["blocks", "kv_heads"])
def _add_parts_kernel(
    parts, dk, dv, part_counts, first_slots, starts, blocks, kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of cut lists have later readers, hence are full."""
    inverse_list = tl.program_id(0)
    count = tl.load(part_counts + inverse_list)
    if count <= 1:
        return
    first_part = tl.load(first_slots + inverse_list).to(tl.int64)
    slot_C = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim_D, dim_F = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_F)[None, :]
    inside_CD = (slot_C >= 0)[:, None] & (dim_D < HEAD_DIM)
    inside_CF = (slot_C >= 0)[:, None] & (dim_F < VALUE_DIM)
    dk_CD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_CF = tl.zeros([ROWS, BLOCK_F], tl.float32)
    for part in range(0, count):
        row_C1 = (((first_part + part) * BLOCK_SIZE + slot_C) * (HEAD_DIM + VALUE_DIM))[:, None]
        dk_CD += tl.load(parts + row_C1 + dim_D, mask=inside_CD, other=0.0)
        dv_CF += tl.load(parts + row_C1 + HEAD_DIM + dim_F, mask=inside_CF, other=0.0)
    token_C = tl.load(starts + inverse_list % blocks) + slot_C
    row_C1 = (token_C * kv_heads + inverse_list // blocks)[:, None]
    tl.store(dk + row_C1 * HEAD_DIM + dim_D, dk_CD.to(dk.dtype.element_ty), mask=inside_CD)
    tl.store(dv + row_C1 * VALUE_DIM + dim_F, dv_CF.to(dv.dtype.element_ty), mask=inside_CF)
