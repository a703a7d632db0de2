# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Backward kernels: dq over a query block's lists, dk and dv over a KV block's readers.

Nothing is added from two programs to one place, so there are no atomics, and results repeat bit by
bit. The gradient of a KV block sums over the heads of its group inside one program. A long list of
readers is cut into items; their float32 parts are added in a second pass, in the order of the list.
What readers of single columns give is added by :mod:`.column_gradient_kernels`.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row, I items, U inverse lists, B tokens of a block, Z places of all query blocks, full or not; in
kernels Y query rows of a tile, C columns (keys) of a tile.
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
from sparsebalance_megatron.attention.kernels.triton.forward_kernel import (
    LOG2_E,
    block_extent,
    block_list,
    column_arguments,
    column_list,
    column_tokens,
    entry_at,
    listed_columns,
    load_rows,
    packed_rows,
    tile_constants,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.index import InverseLists, inverse_lists
from sparsebalance_megatron.attention.kernels.triton.key_step import key_step
from sparsebalance_megatron.attention.kernels.triton.tiles import capability_of, tiles_for
from sparsebalance_megatron.attention.selection import Selection

WANTED_PROGRAMS = 512
"""Programs that fill a device of 132 multiprocessors a few times over."""
_LOG2_E = tl.constexpr(LOG2_E)


def backward_attention(dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGD in the inputs' dtype."""
    dout_THD = with_dense_rows(dout_THD)
    saved = replace(
        saved,
        q_THD=with_dense_rows(saved.q_THD),
        k_TGD=with_dense_rows(saved.k_TGD),
        v_TGD=with_dense_rows(saved.v_TGD),
    )
    k_dtype, columns = saved.k_TGD.dtype, listed_columns(saved.selection)
    with torch.cuda.device_of(dout_THD):
        dq_THD, statistics_2HZ = _query_gradient(dout_THD, saved)
        # What columns add is rounded to the inputs' dtype once, with the rest.
        dtype = k_dtype if columns is None else torch.float32
        dk_TGD, dv_TGD = _key_gradient(dout_THD, saved, statistics_2HZ, dtype)
        if columns is not None:
            add_column_gradients(dout_THD, saved, statistics_2HZ, dk_TGD, dv_TGD, columns)
    return dq_THD, dk_TGD.to(k_dtype), dv_TGD.to(k_dtype)


def _query_gradient(dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    """dq, and of every query row, by block, what dk needs: LSE in units of log2, and delta, the sum
    over D of dout * out. Slots past a short block's end hold 0."""
    q_THD, k_TGD, v_TGD, selection = saved.q_THD, saved.k_TGD, saved.v_TGD, saved.selection
    layout, kv_heads = selection.query_layout, k_TGD.shape[1]
    group = q_THD.shape[1] // kv_heads
    dq_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    statistics_2HZ = torch.zeros(
        2, q_THD.shape[1], layout.blocks * layout.block_size, device=q_THD.device
    )
    capability = capability_of(q_THD.device)
    tile = tiles_for(q_THD.shape[2], q_THD.element_size(), capability).query_gradient
    rows = packed_rows(tile, group, layout.block_size)
    grid = (layout.blocks * kv_heads * (group * layout.block_size // rows),)
    _query_gradient_kernel[grid](
        q_THD,
        k_TGD,
        v_TGD,
        dout_THD,
        saved.out_THD.contiguous(),
        saved.lse_TH.contiguous(),
        dq_THD,
        statistics_2HZ,
        selection.indices_QCK.contiguous(),
        selection.counts_QC.contiguous(),
        selection.own_block_N,
        layout.start_N,
        layout.document_end_N,
        selection.kv_layout.start_N,
        *column_arguments(selection),
        *(stride for x in (q_THD, k_TGD, v_TGD, dout_THD) for stride in x.stride()[:2]),
        saved.softmax_scale,
        layout.blocks,
        selection.indices_QCK.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        **tile_constants(q_THD, layout.block_size, rows, tile),
    )
    return dq_THD, statistics_2HZ


def _key_gradient(
    dout_THD: Tensor, saved: Saved, statistics_2HZ: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dk and dv in ``dtype``, of what is read as blocks; 0 for a block that nobody reads."""
    q_THD, k_TGD, v_TGD, selection = saved.q_THD, saved.k_TGD, saved.v_TGD, saved.selection
    query_layout, layout = selection.query_layout, selection.kv_layout
    tokens, kv_heads, head_dim = k_TGD.shape
    tile = tiles_for(head_dim, q_THD.element_size(), capability_of(q_THD.device)).key_gradient
    constants = tile_constants(q_THD, layout.block_size, min(tile.rows, layout.block_size), tile)
    column_tiles = layout.block_size // min(tile.columns, layout.block_size)
    lists = inverse_lists(selection, wanted_items=-(-WANTED_PROGRAMS // column_tiles))
    dk_TGD = torch.empty(tokens, kv_heads, head_dim, dtype=dtype, device=k_TGD.device)
    dv_TGD = torch.empty_like(dk_TGD)
    parts_I2BD = torch.empty(
        lists.cut_items, 2, layout.block_size, head_dim, dtype=torch.float32, device=k_TGD.device
    )
    _key_gradient_kernel[(lists.items * column_tiles,)](
        q_THD,
        k_TGD,
        v_TGD,
        dout_THD,
        statistics_2HZ,
        dk_TGD,
        dv_TGD,
        parts_I2BD,
        lists.offsets_U,
        lists.queries_E,
        lists.item_list_I,
        lists.item_part_I,
        lists.item_parts_I,
        selection.own_block_N,
        query_layout.start_N,
        query_layout.document_end_N,
        layout.start_N,
        layout.document_end_N,
        *(stride for x in (q_THD, k_TGD, v_TGD, dout_THD) for stride in x.stride()[:2]),
        saved.softmax_scale,
        query_layout.blocks,
        layout.blocks,
        lists.entries_per_item,
        KV_HEADS=kv_heads,
        GROUP=q_THD.shape[1] // kv_heads,
        **constants,
    )
    if lists.cut_lists:
        add_parts(lists, parts_I2BD, dk_TGD, dv_TGD, selection)
    return dk_TGD, dv_TGD


def add_parts(
    lists: InverseLists,
    parts_I2BD: Tensor,
    dk_TGD: Tensor,
    dv_TGD: Tensor,
    selection: Selection,
    *,
    accumulate: bool = False,
) -> None:
    """Second pass over lists that were cut: store the sums of their parts, or add them."""
    layout, head_dim = selection.kv_layout, dk_TGD.shape[2]
    rows = min(32, layout.block_size)
    _add_parts_kernel[(min(lists.cut_lists, lists.order_U.shape[0]), layout.block_size // rows)](
        parts_I2BD,
        dk_TGD,
        dv_TGD,
        lists.order_U,
        lists.parts_U,
        lists.first_item_U,
        layout.start_N,
        layout.blocks,
        ACCUMULATE=accumulate,
        KV_HEADS=dk_TGD.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=layout.block_size,
        ROWS=rows,
        enable_fp_fusion=True,
    )


@triton.jit
def _query_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, visible_YC, dq_YD, score_scale,
                MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    s_YC = tl.dot(q_YD, tl.trans(k_CD), input_precision=PRECISION) * score_scale
    p_YC = tl.exp2(s_YC - lse_Y[:, None])
    if MASKED:
        p_YC = tl.where(visible_YC, p_YC, 0.0)
    dp_YC = tl.dot(dout_YD, tl.trans(v_CD), input_precision=PRECISION)
    ds_YC = p_YC * (dp_YC - delta_Y[:, None])
    return tl.dot(ds_YC.to(k_CD.dtype), k_CD, dq_YD, input_precision=PRECISION)


@triton.jit(do_not_specialize=["blocks", "width", "column_width"])
def _query_gradient_kernel(
    q, k, v, dout, out, lse, dq, statistics, indices, counts, own_blocks,
    query_starts, query_ends, kv_starts, columns, column_counts, column_width,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, blocks, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = GROUP * BLOCK_SIZE // TILE_ROWS
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program = tl.program_id(0)
    row_tile = program % ROW_TILES
    block = blocks - 1 - (program // ROW_TILES) % blocks
    kv_head = program // ROW_TILES // blocks
    start, length = block_extent(query_starts, query_ends, block, BLOCK_SIZE)
    first_slot = (row_tile * TILE_ROWS) % BLOCK_SIZE
    if first_slot >= length:
        return

    score_scale = softmax_scale * _LOG2_E
    row_Y = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slot_Y = row_Y % BLOCK_SIZE
    head_Y = kv_head * GROUP + row_Y // BLOCK_SIZE
    token_Y = start + slot_Y
    valid_Y = slot_Y < length
    place_Y = token_Y * HEADS + head_Y
    column_C = tl.arange(0, TILE_COLUMNS)
    q_YD = load_rows(q + head_Y.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_Y, valid_Y,
                     True, HEAD_DIM, BLOCK_D)  # fmt: skip
    dout_YD = load_rows(dout + head_Y.to(tl.int64)[:, None] * dout_stride_H, dout_stride_T,
                        token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)  # fmt: skip
    out_YD = load_rows(out, HEAD_DIM, place_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    delta_Y = tl.sum(dout_YD.to(tl.float32) * out_YD.to(tl.float32), 1)
    lse_Y = tl.load(lse + place_Y, mask=valid_Y, other=0.0) * _LOG2_E
    statistic_Y = (head_Y.to(tl.int64) * blocks + block) * BLOCK_SIZE + slot_Y
    tl.store(statistics + statistic_Y, lse_Y, mask=valid_Y)
    delta = statistics + HEADS * blocks.to(tl.int64) * BLOCK_SIZE
    tl.store(delta + statistic_Y, delta_Y, mask=valid_Y)
    k_head = k + kv_head.to(tl.int64) * k_stride_G
    v_head = v + kv_head.to(tl.int64) * v_stride_G
    dq_YD = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)

    entries, count, own, own_start, grid_start = block_list(
        indices, counts, own_blocks, kv_starts, block, kv_head, width, KV_HEADS, BLOCK_SIZE
    )
    next_past = entry_at(entries, own, count)
    for step in range(own * COLUMN_TILES, count * COLUMN_TILES):
        past = next_past
        next_past = entry_at(entries, (step + 1) // COLUMN_TILES, count)
        first = grid_start + past * BLOCK_SIZE + (step % COLUMN_TILES) * TILE_COLUMNS
        k_CD = load_rows(k_head + first * k_stride_T, k_stride_T, column_C, column_C >= 0, False,
                         HEAD_DIM, BLOCK_D)  # fmt: skip
        v_CD = load_rows(v_head + first * v_stride_T, v_stride_T, column_C, column_C >= 0, False,
                         HEAD_DIM, BLOCK_D)  # fmt: skip
        dq_YD = _query_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, True, dq_YD, score_scale,
                            False, PRECISION)  # fmt: skip

    if columns is not None:
        tokens, column_count = column_list(
            columns, column_counts, column_width, block, kv_head, KV_HEADS
        )
        next_token_C = column_tokens(tokens, column_C, column_count)
        for first_column in range(0, column_count, TILE_COLUMNS):
            token_C = next_token_C
            place_C = first_column + column_C
            next_token_C = column_tokens(tokens, place_C + TILE_COLUMNS, column_count)
            valid_C = place_C < column_count
            k_CD = load_rows(k_head, k_stride_T, token_C, valid_C, True, HEAD_DIM, BLOCK_D)
            v_CD = load_rows(v_head, v_stride_T, token_C, valid_C, True, HEAD_DIM, BLOCK_D)
            dq_YD = _query_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, valid_C[None, :], dq_YD,
                                score_scale, True, PRECISION)  # fmt: skip

    last_slot = tl.minimum(first_slot + TILE_ROWS, BLOCK_SIZE)
    for first_column in range(0, own * tl.minimum(last_slot, length), TILE_COLUMNS):
        slot_C = first_column + column_C
        token_C = own_start + slot_C
        k_CD = load_rows(k_head, k_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        v_CD = load_rows(v_head, v_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        visible_YC = slot_C[None, :] <= slot_Y[:, None]
        dq_YD = _query_step(q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, visible_YC, dq_YD,
                            score_scale, True, PRECISION)  # fmt: skip

    dim_D = tl.arange(0, BLOCK_D)
    tl.store(dq + place_Y[:, None] * HEAD_DIM + dim_D[None, :],
             (dq_YD * softmax_scale).to(dq.dtype.element_ty),
             mask=valid_Y[:, None] & (dim_D < HEAD_DIM)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["query_blocks", "kv_blocks", "entries_per_item"])
def _key_gradient_kernel(
    q, k, v, dout, statistics, dk, dv, parts, offsets, queries, item_list, item_part, item_parts,
    own_blocks, query_starts, query_ends, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, query_blocks, kv_blocks, entries_per_item,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
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

    score_scale = softmax_scale * _LOG2_E
    begin = tl.load(offsets + inverse_list) + tl.load(item_part + item) * entries_per_item
    stop = tl.minimum(begin + entries_per_item, tl.load(offsets + inverse_list + 1))
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
    v_CD = load_rows(v + kv_head.to(tl.int64) * v_stride_G, v_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)

    # Of the own block, rows before the first column read nothing here.
    first_tile = first_column // TILE_ROWS
    own_tiles = ROW_TILES - first_tile
    for step in range(0, own * GROUP * own_tiles):
        head = kv_head * GROUP + step // own_tiles
        first_slot = (first_tile + step % own_tiles) * TILE_ROWS
        dk_CD, dv_CD = key_step(
            q, dout, statistics, k_CD, v_CD, slot_C, dk_CD, dv_CD, q_stride_T, q_stride_H,
            dout_stride_T, dout_stride_H, score_scale, own_start, first_slot, readers_end, head,
            first_reader, query_blocks, True, HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_ROWS,
            PRECISION,
        )  # fmt: skip
    next_reader = entry_at(readers, own, count)
    for step in range(own * STEPS, count * STEPS):
        reader = next_reader
        next_reader = entry_at(readers, (step + 1) // STEPS, count)
        head = kv_head * GROUP + (step % STEPS) // ROW_TILES
        first_slot = (step % ROW_TILES) * TILE_ROWS
        first_token = grid_start + reader * BLOCK_SIZE
        dk_CD, dv_CD = key_step(
            q, dout, statistics, k_CD, v_CD, slot_C, dk_CD, dv_CD, q_stride_T, q_stride_H,
            dout_stride_T, dout_stride_H, score_scale, first_token, first_slot, readers_end, head,
            reader, query_blocks, False, HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_ROWS, PRECISION,
        )  # fmt: skip

    dk_CD = dk_CD * softmax_scale
    dim_D = tl.arange(0, BLOCK_D)
    stored_CD = valid_C[:, None] & (dim_D < HEAD_DIM)[None, :]
    if tl.load(item_parts + item) > 1:
        row_C = item.to(tl.int64) * (2 * BLOCK_SIZE) + slot_C
        place_CD = row_C[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(parts + place_CD, dk_CD, mask=stored_CD)
        tl.store(parts + place_CD + BLOCK_SIZE * HEAD_DIM, dv_CD, mask=stored_CD)
    else:
        place_CD = (token_C * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(dk + place_CD, dk_CD.to(dk.dtype.element_ty), mask=stored_CD)
        tl.store(dv + place_CD, dv_CD.to(dv.dtype.element_ty), mask=stored_CD)


@triton.jit(do_not_specialize=["blocks"])
def _add_parts_kernel(
    parts, dk, dv, order, part_counts, first_items, starts, blocks,
    ACCUMULATE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Second pass over lists that were cut. Their blocks have later readers, hence are full."""
    position = tl.program_id(0)
    count = tl.load(part_counts + position)
    if count <= 1:
        return
    inverse_list = tl.load(order + position)
    first_item = tl.load(first_items + position)
    kv_head = inverse_list // blocks
    slot_C = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim_D = tl.arange(0, BLOCK_D)
    inside_CD = (slot_C >= 0)[:, None] & (dim_D < HEAD_DIM)[None, :]
    dk_CD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_CD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(0, count):
        row_C = (first_item + part).to(tl.int64) * (2 * BLOCK_SIZE) + slot_C
        place_CD = row_C[:, None] * HEAD_DIM + dim_D[None, :]
        dk_CD += tl.load(parts + place_CD, mask=inside_CD, other=0.0)
        dv_CD += tl.load(parts + place_CD + BLOCK_SIZE * HEAD_DIM, mask=inside_CD, other=0.0)
    token_C = tl.load(starts + inverse_list % blocks) + slot_C
    place_CD = (token_C * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim_D[None, :]
    if ACCUMULATE:
        dk_CD += tl.load(dk + place_CD, mask=inside_CD, other=0.0)
        dv_CD += tl.load(dv + place_CD, mask=inside_CD, other=0.0)
    tl.store(dk + place_CD, dk_CD.to(dk.dtype.element_ty), mask=inside_CD)
    tl.store(dv + place_CD, dv_CD.to(dv.dtype.element_ty), mask=inside_CD)
