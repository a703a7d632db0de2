# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Forward pass and dq over lists of query blocks: one program per tile of query rows.

A query block's rows are ordered by head of the group, then token: a tile holds one head where a
block is at least a tile long, else several heads, which share the block's lists anyway. Past blocks
are full, hence need no mask; then come single columns, if the selection has any, whose keys are
gathered a tile at a time; the own block comes last, under the causal mask.

Shape legend: U of a result (F of out, D of dq), Z places of all query blocks, full or not, C
columns (keys) of a tile; in kernels Y query rows of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LN_2,
    LOG2_E,
    block_extent,
    entry_at,
    load_rows,
    row_strides,
    tile_constants,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of
from sparsebalance_megatron.attention.selection import ColumnLists, Selection


def query_gradient(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    """dq_THD, and by query block what dk needs of every query row, statistics_2HZ: LSE in units of
    log2, and delta, the sum over F of dout * out. Places past a short block's end hold 0."""
    q_THD, layout = saved.q_THD, saved.selection.query_layout
    dq_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    statistics_2HZ = torch.zeros(
        2, q_THD.shape[1], layout.blocks * layout.block_size, device=q_THD.device
    )
    launch(saved, dout_THF, (saved.out_THF, saved.lse_TH, dq_THD, statistics_2HZ))
    return dq_THD, statistics_2HZ


def listed_columns(selection: Selection) -> ColumnLists | None:
    """A selection's columns, contiguous; None where its lists have no places."""
    columns = selection.columns
    if columns is None or columns.tokens_NGK.shape[2] == 0:
        return None
    return ColumnLists(
        tokens_NGK=columns.tokens_NGK.contiguous(), counts_NG=columns.counts_NG.contiguous()
    )


def launch(given: Inputs, dout_THF: Tensor | None, results: tuple[Tensor | None, ...]) -> None:
    """Launch the kernel, whose arguments after dout are ``results``."""
    (q_THD, k_TGD, v_TGF), selection = given.qkv, given.selection
    tiles = tiles_of(k_TGD, v_TGF)
    tile = tiles.forward if dout_THF is None else tiles.query_gradient
    scale = given.softmax_scale * (float(LOG2_E.value) if dout_THF is None else 1.0)
    layout, kv_heads = selection.query_layout, k_TGD.shape[1]
    group = q_THD.shape[1] // kv_heads
    # Tiles cut the rows of a query block evenly; their rows are a power of two.
    rows = math.gcd(tile.rows, group * layout.block_size)
    columns = listed_columns(selection)
    _query_block_kernel[(layout.blocks * kv_heads * (group * layout.block_size // rows),)](
        *(*given.qkv, dout_THF, *results),
        *(selection.indices_QCK.contiguous(), selection.counts_QC.contiguous()),
        *(selection.own_block_N, layout.start_N, layout.document_end_N),
        selection.kv_layout.start_N,
        *((columns.tokens_NGK, columns.counts_NG) if columns else (None, None)),
        columns.tokens_NGK.shape[2] if columns else None,
        *row_strides(q_THD, k_TGD, v_TGF),
        *((None, None) if dout_THF is None else row_strides(dout_THF)),
        *(scale, layout.blocks, selection.indices_QCK.shape[2]),
        KV_HEADS=kv_heads,
        GROUP=group,
        **tile_constants(k_TGD, v_TGF, layout.block_size, rows, tile),
    )


@triton.jit
def take_in(q_YD, dout_YF, k_CD, v_CF, visible_YC, peak_Y, total_Y, result_YU, score_scale,
             MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Take one tile of keys in: out and its peak and total so far, scores in units of log2; or,
    with dout, dq, of which peak is the LSE and total the delta."""
    s_YC = tl.dot(q_YD, tl.trans(k_CD), input_precision=PRECISION)
    if dout_YF is not None:
        p_YC = tl.exp2(s_YC * score_scale - peak_Y[:, None])
        if MASKED:
            p_YC = tl.where(visible_YC, p_YC, 0.0)
        dp_YC = tl.dot(dout_YF, tl.trans(v_CF), input_precision=PRECISION)
        ds_YC = p_YC * (dp_YC - total_Y[:, None])
        result_YU = tl.dot(ds_YC.to(k_CD.dtype), k_CD, result_YU, input_precision=PRECISION)
    else:
        if MASKED:
            s_YC = tl.where(visible_YC, s_YC, float("-inf"))
        new_peak_Y = tl.maximum(peak_Y, tl.max(s_YC, 1) * score_scale)
        p_YC = tl.exp2(s_YC * score_scale - new_peak_Y[:, None])
        shrink_Y = tl.exp2(peak_Y - new_peak_Y)
        total_Y = total_Y * shrink_Y + tl.sum(p_YC, 1)
        result_YU = tl.dot(p_YC.to(v_CF.dtype), v_CF, result_YU * shrink_Y[:, None],
                           input_precision=PRECISION)  # fmt: skip
        peak_Y = new_peak_Y
    return peak_Y, total_Y, result_YU


@triton.jit(do_not_specialize=["blocks", "width", "column_width"])
def _query_block_kernel(
    q, k, v, dout, out, lse, dq, statistics, indices, counts, own_blocks, query_starts, query_ends,
    kv_starts, columns, column_counts, column_width,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, scale, blocks, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out and lse; or, with dout, dq and statistics.

    ``scale``: of scores, in units of log2 for the forward pass.
    """
    ROW_TILES: tl.constexpr = GROUP * BLOCK_SIZE // TILE_ROWS
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    HEADS: tl.constexpr = KV_HEADS * GROUP
    RESULT_DIM: tl.constexpr = VALUE_DIM if dout is None else HEAD_DIM
    BLOCK_U: tl.constexpr = BLOCK_F if dout is None else BLOCK_D
    # Neighbouring programs share a list, hence the cache; late blocks have the longest lists.
    program = tl.program_id(0)
    row_tile = program % ROW_TILES
    block = blocks - 1 - (program // ROW_TILES) % blocks
    kv_head = program // ROW_TILES // blocks
    start, length = block_extent(query_starts, query_ends, block, BLOCK_SIZE)
    first_slot = (row_tile * TILE_ROWS) % BLOCK_SIZE
    if first_slot >= length:
        return

    row_Y = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slot_Y = row_Y % BLOCK_SIZE
    head_Y = kv_head * GROUP + row_Y // BLOCK_SIZE
    token_Y = start + slot_Y
    valid_Y = slot_Y < length
    place_Y = token_Y * HEADS + head_Y
    dim_U = tl.arange(0, BLOCK_U)
    column_C = tl.arange(0, TILE_COLUMNS)
    q_YD = load_rows(q + head_Y.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_Y, valid_Y,
                     True, HEAD_DIM, BLOCK_D)  # fmt: skip
    k += kv_head.to(tl.int64) * k_stride_G
    v += kv_head.to(tl.int64) * v_stride_G
    result_YU = tl.zeros([TILE_ROWS, BLOCK_U], tl.float32)
    if dout is not None:
        score_scale = scale * LOG2_E
        dout_YF = load_rows(dout + head_Y.to(tl.int64)[:, None] * dout_stride_H, dout_stride_T,
                            token_Y, valid_Y, True, VALUE_DIM, BLOCK_F)  # fmt: skip
        out_YF = load_rows(out, VALUE_DIM, place_Y, valid_Y, True, VALUE_DIM, BLOCK_F)
        total_Y = tl.sum(dout_YF.to(tl.float32) * out_YF.to(tl.float32), 1)
        peak_Y = tl.load(lse + place_Y, mask=valid_Y, other=0.0) * LOG2_E
        statistic_Y = (head_Y.to(tl.int64) * blocks + block) * BLOCK_SIZE + slot_Y
        tl.store(statistics + statistic_Y, peak_Y, mask=valid_Y)
        delta = statistics + HEADS * blocks.to(tl.int64) * BLOCK_SIZE
        tl.store(delta + statistic_Y, total_Y, mask=valid_Y)
    else:
        score_scale = scale
        dout_YF = None
        peak_Y = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total_Y = tl.zeros([TILE_ROWS], tl.float32)

    # The blocks of a list lie on one grid, so the starts of the past ones need no look-up.
    row = block.to(tl.int64) * KV_HEADS + kv_head
    count = tl.load(counts + row)
    entries = indices + row * width
    head_entry = entry_at(entries, 0, count)
    own = ((count > 0) & (head_entry == tl.load(own_blocks + block))).to(tl.int32)
    own_start = tl.load(kv_starts + head_entry)
    grid_start = own_start - head_entry * BLOCK_SIZE
    next_past = entry_at(entries, own, count)
    for step in range(own * COLUMN_TILES, count * COLUMN_TILES):
        past = next_past
        next_past = entry_at(entries, (step + 1) // COLUMN_TILES, count)
        first = grid_start + past * BLOCK_SIZE + (step % COLUMN_TILES) * TILE_COLUMNS
        k_CD = load_rows(k + first * k_stride_T, k_stride_T, column_C, column_C >= 0, False,
                         HEAD_DIM, BLOCK_D)  # fmt: skip
        v_CF = load_rows(v + first * v_stride_T, v_stride_T, column_C, column_C >= 0, False,
                         VALUE_DIM, BLOCK_F)  # fmt: skip
        peak_Y, total_Y, result_YU = take_in(q_YD, dout_YF, k_CD, v_CF, True, peak_Y, total_Y,
                                              result_YU, score_scale, False, PRECISION)  # fmt: skip

    if columns is not None:
        tokens = columns + row * column_width
        column_count = tl.load(column_counts + row)
        next_token_C = entry_at(tokens, column_C, column_count).to(tl.int64)
        for first_column in range(0, column_count, TILE_COLUMNS):
            token_C = next_token_C
            place_C = first_column + column_C
            next_place_C = place_C + TILE_COLUMNS
            next_token_C = entry_at(tokens, next_place_C, column_count).to(tl.int64)
            valid_C = place_C < column_count
            k_CD = load_rows(k, k_stride_T, token_C, valid_C, True, HEAD_DIM, BLOCK_D)
            v_CF = load_rows(v, v_stride_T, token_C, valid_C, True, VALUE_DIM, BLOCK_F)
            peak_Y, total_Y, result_YU = take_in(
                q_YD, dout_YF, k_CD, v_CF, valid_C[None, :], peak_Y, total_Y, result_YU,
                score_scale, True, PRECISION,
            )  # fmt: skip

    last_slot = tl.minimum(first_slot + TILE_ROWS, BLOCK_SIZE)
    for first_column in range(0, own * tl.minimum(last_slot, length), TILE_COLUMNS):
        slot_C = first_column + column_C
        token_C = own_start + slot_C
        k_CD = load_rows(k, k_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        v_CF = load_rows(v, v_stride_T, token_C, slot_C < length, True, VALUE_DIM, BLOCK_F)
        visible_YC = slot_C[None, :] <= slot_Y[:, None]
        peak_Y, total_Y, result_YU = take_in(
            q_YD, dout_YF, k_CD, v_CF, visible_YC, peak_Y, total_Y, result_YU, score_scale, True,
            PRECISION,
        )  # fmt: skip

    place_YU = place_Y[:, None] * RESULT_DIM + dim_U[None, :]
    stored_YU = valid_Y[:, None] & (dim_U < RESULT_DIM)[None, :]
    if dout is not None:
        tl.store(dq + place_YU, (result_YU * scale).to(dq.dtype.element_ty), mask=stored_YU)
    else:
        # A row without keys: out 0, lse -inf.
        result_YU = result_YU / tl.where(total_Y != 0.0, total_Y, 1.0)[:, None]
        lse_Y = tl.where(total_Y != 0.0, (peak_Y + tl.log2(total_Y)) * LN_2, float("-inf"))
        tl.store(lse + place_Y, lse_Y, mask=valid_Y)
        tl.store(out + place_YU, result_YU.to(out.dtype.element_ty), mask=stored_YU)
