# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The backward pass of lists by token, and its kernel for dk and dv.

dq goes as the forward pass does. dk and dv stay in registers while a program streams the readers
that chose its block, of all heads that read its KV head; long lists are cut into items, whose
float32 parts are added in order.

Shape legend: E both side by side, I items, B tokens of a block, C columns (keys) of a tile, O rows
of output; in kernels Y rows of a tile (reader by reader, the query heads of its list side by side).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LOG2_E,
    add_parts,
    block_extent,
    entry_at,
    key_step,
    lists_for,
    load_rows,
    parts_of,
    row_strides,
    store_key_gradients,
    tile_constants,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of
from sparsebalance_megatron.attention.kernels.triton.token_query_kernels import launch

_DELTA_ROWS = 32


def backward_by_token(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGF in the inputs' dtype."""
    tensors = saved.q_THD, saved.k_TGD, saved.v_TGF, dout_THF
    inputs = q_THD, k_TGD, v_TGF, dout_THF = tuple(with_dense_rows(x) for x in tensors)
    selection, layout = saved.selection, saved.selection.kv_layout
    query_heads, kv_heads, tiles = q_THD.shape[1], k_TGD.shape[1], tiles_of(k_TGD, v_TGF)
    tile = tiles.key_gradient
    constants = tile_constants(k_TGD, v_TGF, layout.block_size, tile.rows, tile)
    column_tiles = layout.block_size // constants["TILE_COLUMNS"]
    dq_THD, dk_TGD, dv_TGF = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TGD, v_TGF)
    )
    lists = lists_for(selection, k_TGD, v_TGF, column_tiles)
    parts_IBE = parts_of(lists, k_TGD, v_TGF, layout)
    with torch.cuda.device_of(dout_THF):
        lse_TH = saved.lse_TH.contiguous()
        delta_TH = _delta(dout_THF, saved.out_THF.contiguous())
        launch(
            *(tiles.query_gradient, selection, lists.entries),
            (*inputs, dq_THD, lse_TH, delta_TH),
            saved.softmax_scale,
        )
        _token_key_kernel[(len(lists.item_list_I) * column_tiles,)](
            *(*inputs, lse_TH, delta_TH, dk_TGD, dv_TGF, parts_IBE),
            *(lists.entries.bounds_J, lists.entries.readers_E),
            *(lists.item_list_I, lists.item_part_I, lists.item_slot_I),
            *(selection.own_block_N, selection.query_layout.block_T),
            *(selection.query_layout.start_N, layout.start_N, layout.document_end_N),
            *row_strides(*inputs),
            *(saved.softmax_scale, layout.blocks, lists.entries_per_item, lists.entries.tiles),
            selection.counts_QC.shape[1] // kv_heads,
            KV_HEADS=kv_heads,
            GROUP=query_heads // kv_heads,
            HEADS=query_heads // selection.counts_QC.shape[1],
            **constants,
        )
        add_parts(lists, parts_IBE, dk_TGD, dv_TGF, layout)
    return dq_THD, dk_TGD, dv_TGF


def _delta(dout_THF: Tensor, out_THF: Tensor) -> Tensor:
    """delta_TH: the sum over F of dout * out, float32."""
    tokens, query_heads, value_dim = out_THF.shape
    delta_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=out_THF.device)
    _delta_kernel[(triton.cdiv(delta_TH.numel(), _DELTA_ROWS),)](
        dout_THF,
        out_THF,
        delta_TH,
        *row_strides(dout_THF),
        tokens,
        HEADS=query_heads,
        VALUE_DIM=value_dim,
        BLOCK_F=triton.next_power_of_2(value_dim),
        ROWS=_DELTA_ROWS,
        enable_fp_fusion=True,
    )
    return delta_TH


@triton.jit(do_not_specialize=["tokens"])
def _delta_kernel(
    dout, out, delta, dout_stride_T, dout_stride_H, tokens,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid_O = row_O < tokens * HEADS
    dout_OF = load_rows(dout + (row_O % HEADS)[:, None] * dout_stride_H, dout_stride_T,
                        row_O // HEADS, valid_O, True, VALUE_DIM, BLOCK_F)  # fmt: skip
    out_OF = load_rows(out, VALUE_DIM, row_O, valid_O, True, VALUE_DIM, BLOCK_F)
    delta_O = tl.sum(dout_OF.to(tl.float32) * out_OF.to(tl.float32), 1)
    tl.store(delta + row_O, delta_O, mask=valid_O)


@triton.jit(do_not_specialize=["blocks", "entries_per_item", "tiles", "shared"])
def _token_key_kernel(
    q, k, v, dout, lse, delta, dk, dv, parts, bounds, entries, item_list, item_part, item_slot,
    own_blocks, token_blocks, query_starts, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, blocks, entries_per_item, tiles, shared,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    QUERY_HEADS: tl.constexpr = KV_HEADS * GROUP
    item = tl.program_id(0) // COLUMN_TILES
    first_column = (tl.program_id(0) % COLUMN_TILES) * TILE_COLUMNS
    inverse_list = tl.load(item_list + item)
    if inverse_list < 0:
        return
    kv_head, block = inverse_list // blocks, inverse_list % blocks
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    if first_column >= length:
        return

    score_scale = softmax_scale * LOG2_E
    bounds += inverse_list.to(tl.int64) * tiles
    begin = tl.load(bounds) + tl.load(item_part + item) * entries_per_item
    count = tl.minimum(tl.load(bounds + tiles) - begin, entries_per_item)
    entries += begin
    # As in the forward pass, tiles that may hold rows of the block itself come first.
    query_block = tl.load(token_blocks + tl.load(entries, mask=count > 0, other=0) // shared)
    own = ((count > 0) & (tl.load(own_blocks + query_block) == block)).to(tl.int32)
    own_start = tl.load(query_starts + query_block)
    all_tiles = tl.cdiv(count * HEADS, TILE_ROWS)
    own_tiles = own * tl.minimum(tl.cdiv(length * shared * HEADS, TILE_ROWS), all_tiles)
    slot_C = first_column + tl.arange(0, TILE_COLUMNS)
    token_C = start + slot_C
    valid_C = slot_C < length
    k_CD = load_rows(k + kv_head.to(tl.int64) * k_stride_G, k_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    v_CF = load_rows(v + kv_head.to(tl.int64) * v_stride_G, v_stride_T, token_C, valid_C, True,
                     VALUE_DIM, BLOCK_F)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CF = tl.zeros([TILE_COLUMNS, BLOCK_F], tl.float32)

    place_Y = tl.arange(0, TILE_ROWS)
    next_Y = entry_at(entries, place_Y // HEADS, count)
    for past in tl.static_range(2):
        for tile in range(own_tiles if past else 0, all_tiles if past else own_tiles):
            reader_Y, row_Y = next_Y, place_Y + tile * TILE_ROWS
            valid_Y = row_Y < count * HEADS
            next_Y = entry_at(entries, (row_Y + TILE_ROWS) // HEADS, count)
            token_Y = (reader_Y // shared).to(tl.int64)
            head_Y = kv_head * GROUP + (reader_Y % shared) * HEADS + row_Y % HEADS
            q_YD = load_rows(q + head_Y.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_Y,
                             valid_Y, True, HEAD_DIM, BLOCK_D)  # fmt: skip
            dout_YF = load_rows(dout + head_Y.to(tl.int64)[:, None] * dout_stride_H, dout_stride_T,
                                token_Y, valid_Y, True, VALUE_DIM, BLOCK_F)  # fmt: skip
            # Past the last reader q, dout and delta are 0.
            statistic_Y = token_Y * QUERY_HEADS + head_Y
            lse_Y = tl.load(lse + statistic_Y, mask=valid_Y, other=0.0) * LOG2_E
            delta_Y = tl.load(delta + statistic_Y, mask=valid_Y, other=0.0)
            dk_CD, dv_CF = key_step(
                q_YD, dout_YF, lse_Y, delta_Y, k_CD, v_CF, slot_C, token_Y - own_start, dk_CD,
                dv_CF, score_scale, past == 0, PRECISION,
            )  # fmt: skip

    store_key_gradients(dk, dv, parts, dk_CD * softmax_scale, dv_CF, token_C, slot_C, valid_C,
                        kv_head, KV_HEADS, tl.load(item_slot + item), HEAD_DIM, BLOCK_D,
                        VALUE_DIM, BLOCK_F, BLOCK_SIZE)  # fmt: skip
