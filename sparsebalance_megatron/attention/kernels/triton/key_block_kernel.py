# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Backward pass over lists of query blocks, and its kernel for dk and dv of blocks.

Nothing is added from two programs to one place, so there are no atomics, and results repeat bit by
bit. The gradient of a KV block sums over the heads of its group inside one program. A long list of
readers is cut into items; their float32 parts are added in a second pass, in the order of the list.
What readers of single columns give is added by :mod:`.column_gradient_kernels`.

Shape legend: E both side by side, I items, B tokens of a block, Z places of all query blocks, full
or not; in kernels C columns (keys) of a tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.column_gradient_kernels import (
    add_column_gradients,
)
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LOG2_E,
    add_parts,
    block_extent,
    entry_at,
    lists_for,
    load_rows,
    parts_of,
    query_block_step,
    row_strides,
    store_key_gradients,
    tile_constants,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.query_block_kernel import (
    listed_columns,
    query_gradient,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of


def backward_attention(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGF in the inputs' dtype."""
    dout_THF = with_dense_rows(dout_THF)
    saved = replace(
        saved,
        q_THD=with_dense_rows(saved.q_THD),
        k_TGD=with_dense_rows(saved.k_TGD),
        v_TGF=with_dense_rows(saved.v_TGF),
    )
    k_dtype, columns = saved.k_TGD.dtype, listed_columns(saved.selection)
    with torch.cuda.device_of(dout_THF):
        dq_THD, statistics_2HZ = query_gradient(dout_THF, saved)
        # What columns add is rounded to the inputs' dtype once, with the rest.
        dtype = k_dtype if columns is None else torch.float32
        dk_TGD, dv_TGF = _key_gradient(dout_THF, saved, statistics_2HZ, dtype)
        if columns is not None:
            add_column_gradients(dout_THF, saved, statistics_2HZ, dk_TGD, dv_TGF, columns)
    return dq_THD, dk_TGD.to(k_dtype), dv_TGF.to(k_dtype)


def _key_gradient(
    dout_THF: Tensor, saved: Saved, statistics_2HZ: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dk and dv in ``dtype``, of what is read as blocks; 0 for a block that no query reads."""
    q_THD, k_TGD, v_TGF, selection = saved.q_THD, saved.k_TGD, saved.v_TGF, saved.selection
    query_layout, layout = selection.query_layout, selection.kv_layout
    kv_heads, rows = k_TGD.shape[1], layout.block_size
    tile = tiles_of(k_TGD, v_TGF).key_gradient
    constants = tile_constants(k_TGD, v_TGF, rows, min(tile.rows, rows), tile)
    column_tiles = layout.block_size // constants["TILE_COLUMNS"]
    lists = lists_for(selection, k_TGD, v_TGF, column_tiles)
    dk_TGD, dv_TGF = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k_TGD, v_TGF))
    parts_IBE = parts_of(lists, k_TGD, v_TGF, layout)
    _key_block_kernel[(len(lists.item_list_I) * column_tiles,)](
        q_THD,
        k_TGD,
        v_TGF,
        dout_THF,
        statistics_2HZ,
        dk_TGD,
        dv_TGF,
        parts_IBE,
        lists.entries.bounds_J,
        lists.entries.readers_E,
        lists.item_list_I,
        lists.item_part_I,
        lists.item_slot_I,
        selection.own_block_N,
        query_layout.start_N,
        query_layout.document_end_N,
        layout.start_N,
        layout.document_end_N,
        *row_strides(q_THD, k_TGD, v_TGF, dout_THF),
        saved.softmax_scale,
        query_layout.blocks,
        layout.blocks,
        lists.entries_per_item,
        lists.entries.tiles,
        KV_HEADS=kv_heads,
        GROUP=q_THD.shape[1] // kv_heads,
        **constants,
    )
    add_parts(lists, parts_IBE, dk_TGD, dv_TGF, layout)
    return dk_TGD, dv_TGF


@triton.jit(do_not_specialize=["query_blocks", "kv_blocks", "entries_per_item", "tiles"])
def _key_block_kernel(
    q, k, v, dout, statistics, dk, dv, parts, bounds, queries, item_list, item_part, item_slot,
    own_blocks, query_starts, query_ends, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, query_blocks, kv_blocks, entries_per_item,
    tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = BLOCK_SIZE // TILE_ROWS
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    STEPS: tl.constexpr = GROUP * ROW_TILES
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program = tl.program_id(0)
    item = program // COLUMN_TILES
    first_column = (program % COLUMN_TILES) * TILE_COLUMNS
    inverse_list = tl.load(item_list + item)
    if inverse_list < 0:
        return
    kv_head = inverse_list // kv_blocks
    block = inverse_list % kv_blocks
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    if first_column >= length:
        return

    score_scale = softmax_scale * LOG2_E
    bounds += inverse_list.to(tl.int64) * tiles
    begin = tl.load(bounds) + tl.load(item_part + item) * entries_per_item
    stop = tl.minimum(begin + entries_per_item, tl.load(bounds + tiles))
    # Readers rise, and none comes before the block: its own queries are the first, if they read it.
    # They lie on one grid, so the starts of the others need no look-up; all but the last are full.
    readers = queries + begin
    count = stop - begin
    first_reader = tl.load(readers, mask=count > 0, other=0)
    last_reader = tl.load(readers + count - 1, mask=count > 0, other=0)
    own = ((count > 0) & (tl.load(own_blocks + first_reader) == block)).to(tl.int32)
    own_start = tl.load(query_starts + first_reader)
    grid_start = own_start - first_reader * BLOCK_SIZE
    readers_end = tl.load(query_ends + last_reader)
    slot_C = first_column + tl.arange(0, TILE_COLUMNS)
    token_C = start + slot_C
    valid_C = slot_C < length
    k_CD = load_rows(k + kv_head.to(tl.int64) * k_stride_G, k_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    v_CF = load_rows(v + kv_head.to(tl.int64) * v_stride_G, v_stride_T, token_C, valid_C, True,
                     VALUE_DIM, BLOCK_F)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CF = tl.zeros([TILE_COLUMNS, BLOCK_F], tl.float32)

    # Of the own block, rows before the first column read nothing here.
    first_tile = first_column // TILE_ROWS
    own_tiles = ROW_TILES - first_tile
    for step in range(0, own * GROUP * own_tiles):
        head = kv_head * GROUP + step // own_tiles
        first_slot = (first_tile + step % own_tiles) * TILE_ROWS
        dk_CD, dv_CF = query_block_step(
            q, dout, statistics, k_CD, v_CF, slot_C, dk_CD, dv_CF, q_stride_T, q_stride_H,
            dout_stride_T, dout_stride_H, score_scale, own_start, first_slot, readers_end, head,
            first_reader, query_blocks, True, HEADS, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_F,
            BLOCK_SIZE, TILE_ROWS, PRECISION,
        )  # fmt: skip
    next_reader = entry_at(readers, own, count)
    for step in range(own * STEPS, count * STEPS):
        reader = next_reader
        next_reader = entry_at(readers, (step + 1) // STEPS, count)
        head = kv_head * GROUP + (step % STEPS) // ROW_TILES
        first_slot = (step % ROW_TILES) * TILE_ROWS
        first_token = grid_start + reader * BLOCK_SIZE
        dk_CD, dv_CF = query_block_step(
            q, dout, statistics, k_CD, v_CF, slot_C, dk_CD, dv_CF, q_stride_T, q_stride_H,
            dout_stride_T, dout_stride_H, score_scale, first_token, first_slot, readers_end, head,
            reader, query_blocks, False, HEADS, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_F, BLOCK_SIZE,
            TILE_ROWS, PRECISION,
        )  # fmt: skip

    store_key_gradients(dk, dv, parts, dk_CD * softmax_scale, dv_CF, token_C, slot_C, valid_C,
                        kv_head, KV_HEADS, tl.load(item_slot + item), HEAD_DIM, BLOCK_D,
                        VALUE_DIM, BLOCK_F, BLOCK_SIZE)  # fmt: skip
