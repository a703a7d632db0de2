# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Forward pass and dq over lists by token: tiles of the tokens that chose a KV block, then a sum.

A program keeps the keys and values of its block and streams the queries that chose it; each entry
of a list gets its partial result, and a second kernel adds up a token's in the order of its list.
Accumulators that a program reads back from memory would save the second kernel, but need a barrier
in the loop, which stops the compiler from copying ahead and which Triton's interpreter cannot
check; between two kernels the order is certain.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, C heads that
select; in kernels Y query rows of a tile (token by token, heads side by side), C columns (keys) of
a tile, O rows of output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LN_2,
    LOG2_E,
    block_extent,
    entry_at,
    load_rows,
    query_step,
    row_strides,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import capability_of, token_tiles_for
from sparsebalance_megatron.attention.kernels.triton.token_work import (
    OUTPUT_NUMBERS,
    STREAM_NUMBERS,
    TokenWork,
    head_batches,
    output_rows,
    own_prefix,
    resident_tiles,
    row_places,
    store_partial,
    unit_heads,
)
from sparsebalance_megatron.attention.selection import Selection


def forward_by_token(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in the inputs' dtype and lse_TH in float32, without a gradient.

    Lists need not hold their own block, so attention over parts of a list can be merged.
    """
    (_, query_heads, head_dim), kv_heads = q_THD.shape, k_TGD.shape[1]
    q_THD, k_TGD, v_TGD = (with_dense_rows(x) for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    tile = token_tiles_for(head_dim, q_THD.element_size(), capability_of(q_THD.device)).forward
    heads = unit_heads(selection, query_heads, tile.rows)
    with torch.cuda.device_of(q_THD):
        for batch in head_batches(selection, query_heads, kv_heads):
            work = TokenWork.of(q_THD, kv_heads, batch, tile, heads, streamed=1)
            parts, part_lse = (work.buffer(size, q_THD.device) for size in (head_dim, 1))
            counts_TC = batch.selection.counts_QC.contiguous()
            for units, chunk in work.launches():
                _stream_kernel[work.stream_grid(units)](
                    *(q_THD, k_TGD, v_TGD, None, None, None, parts, part_lse),
                    *work.stream_arguments(units, chunk),
                    *row_strides(q_THD, k_TGD, v_TGD),
                    *(None, None),
                    softmax_scale * LOG2_E.value,
                    query_heads,
                    **work.stream_constants(q_THD),
                )
                _merge_kernel[work.output_grid(units)](
                    *(parts, part_lse, out_THD, lse_TH, counts_TC),
                    *work.output_arguments(units, chunk, query_heads),
                    **work.output_constants(),
                )
    return out_THD, lse_TH


def add_query_gradient(
    dq_THD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    lse_TH: Tensor,
    delta_TH: Tensor,
    work: TokenWork,
    softmax_scale: float,
) -> None:
    """Write dq of a batch's heads.

    Args:
        dq_THD: of all heads.
        inputs: q, k, v and dout, with dense rows.
        lse_TH, delta_TH: of the backward pass.
        work: of the batch.
        softmax_scale: factor on q . k.
    """
    _, query_heads, head_dim = dq_THD.shape
    parts = work.buffer(head_dim, dq_THD.device)
    counts_TC = work.batch.selection.counts_QC.contiguous()
    for units, chunk in work.launches():
        _stream_kernel[work.stream_grid(units)](
            *(*inputs, lse_TH, delta_TH, parts, None),
            *work.stream_arguments(units, chunk),
            *row_strides(*inputs),
            softmax_scale,
            query_heads,
            **work.stream_constants(dq_THD),
        )
        _sum_kernel[work.output_grid(units)](
            *(parts, dq_THD, counts_TC),
            *work.output_arguments(units, chunk, query_heads),
            softmax_scale,
            **work.output_constants(),
        )


@triton.jit
def _attend(q_YD, keys, values, slot_Y, first_column, score_scale, MASKED: tl.constexpr,
            BLOCK_D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
            COLUMN_TILES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Attention over the tiles a program keeps, and its LSE in units of log2."""
    peak_Y = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total_Y = tl.zeros([TILE_ROWS], tl.float32)
    out_YD = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    for tile in tl.static_range(COLUMN_TILES):
        s_YC = tl.dot(q_YD, tl.trans(keys[tile]), input_precision=PRECISION)
        if MASKED:
            slot_C = first_column + tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
            s_YC = tl.where(slot_C[None, :] <= slot_Y[:, None], s_YC, float("-inf"))
        new_peak_Y = tl.maximum(peak_Y, tl.max(s_YC, 1) * score_scale)
        # Of the own block's later columns an early token may see none.
        base_Y = tl.where(new_peak_Y == float("-inf"), 0.0, new_peak_Y)
        p_YC = tl.exp2(s_YC * score_scale - base_Y[:, None])
        shrink_Y = tl.exp2(peak_Y - base_Y)
        total_Y = total_Y * shrink_Y + tl.sum(p_YC, 1)
        out_YD = tl.dot(p_YC.to(q_YD.dtype), values[tile], out_YD * shrink_Y[:, None],
                        input_precision=PRECISION)  # fmt: skip
        peak_Y = new_peak_Y
    total_Y = tl.where(total_Y == 0.0, 1.0, total_Y)
    return out_YD / total_Y[:, None], peak_Y + tl.log2(total_Y)


@triton.jit
def _query_gradient(q_YD, dout_YD, lse_Y, delta_Y, keys, values, slot_Y, first_column, score_scale,
                    MASKED: tl.constexpr, BLOCK_D: tl.constexpr, TILE_ROWS: tl.constexpr,
                    TILE_COLUMNS: tl.constexpr, COLUMN_TILES: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """dq / softmax_scale from the tiles a program keeps."""
    dq_YD = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    for tile in tl.static_range(COLUMN_TILES):
        slot_C = first_column + tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        visible_YC = slot_C[None, :] <= slot_Y[:, None]
        dq_YD = query_step(q_YD, dout_YD, lse_Y, delta_Y, keys[tile], values[tile], visible_YC,
                           dq_YD, score_scale, MASKED, PRECISION)  # fmt: skip
    return dq_YD


@triton.jit(do_not_specialize=[*STREAM_NUMBERS, "query_heads"])
def _stream_kernel(
    q, k, v, dout, lse, delta, parts, part_lse, entries, bounds, item_list, item_part, own_blocks,
    token_blocks, query_starts, kv_starts, kv_ends, first_unit, first_head, group, chunk, chunks,
    chunk_tokens, lists, items, blocks, width, place_bits, q_stride_T, q_stride_H, k_stride_T,
    k_stride_G, v_stride_T, v_stride_G, dout_stride_T, dout_stride_H, scale, query_heads,
    HEADS: tl.constexpr, LIST_UNITS: tl.constexpr, ITEM_ENTRIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, COLUMN_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the partial results and LSEs of out; or, with dout, those of dq.

    ``scale``: of scores, in units of log2 for the forward pass.
    """
    PARTS: tl.constexpr = BLOCK_SIZE // (TILE_COLUMNS * COLUMN_TILES)
    TOKENS: tl.constexpr = TILE_ROWS // HEADS
    item = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    unit = first_unit + tl.program_id(1)
    list_head = unit // LIST_UNITS
    place = (chunk.to(tl.int64) * lists + list_head) * items + item
    block = tl.load(item_list + place)
    if block < 0:
        return
    bounds += (list_head.to(tl.int64) * blocks + block) * chunks + chunk
    begin = tl.load(bounds) + tl.load(item_part + place) * ITEM_ENTRIES
    count = tl.minimum(tl.load(bounds + 1) - begin, ITEM_ENTRIES)
    entries += begin
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    masked, own_start = own_prefix(entries, count, own_blocks, token_blocks, query_starts, block,
                                   length, place_bits, TOKENS)  # fmt: skip
    first_column = part * (TILE_COLUMNS * COLUMN_TILES)
    first_head += unit * HEADS
    kv_head = (first_head // group).to(tl.int64)
    keys = resident_tiles((), k + kv_head * k_stride_G, k_stride_T, start, length, first_column,
                          HEAD_DIM, BLOCK_D, TILE_COLUMNS, COLUMN_TILES)  # fmt: skip
    values = resident_tiles((), v + kv_head * v_stride_G, v_stride_T, start, length, first_column,
                            HEAD_DIM, BLOCK_D, TILE_COLUMNS, COLUMN_TILES)  # fmt: skip

    head_Y, place_Y = row_places(HEADS, TILE_ROWS)
    q += (first_head + head_Y).to(tl.int64)[:, None] * q_stride_H
    if dout is not None:
        score_scale = scale * LOG2_E
        dout += (first_head + head_Y).to(tl.int64)[:, None] * dout_stride_H
    else:
        score_scale = scale
    # A launch's results lie unit by unit; tokens of a chunk count from its first.
    moved = (tl.program_id(1) - chunk) * chunk_tokens
    next_Y = entry_at(entries, place_Y, count)
    for past in tl.static_range(2):
        # Tiles that may hold tokens of the block itself, then the others.
        for tile in range(masked if past else 0, tl.cdiv(count, TOKENS) if past else masked):
            entry_Y, valid_Y = next_Y, place_Y + tile * TOKENS < count
            next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
            token_Y = (entry_Y >> place_bits).to(tl.int64)
            q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
            if dout is not None:
                dout_YD = load_rows(dout, dout_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
                row_Y = token_Y * query_heads + first_head + head_Y
                lse_Y = tl.load(lse + row_Y, mask=valid_Y, other=0.0) * LOG2_E
                delta_Y = tl.load(delta + row_Y, mask=valid_Y, other=0.0)
                result_YD = _query_gradient(
                    q_YD, dout_YD, lse_Y, delta_Y, keys, values, token_Y - own_start, first_column,
                    score_scale, past == 0, BLOCK_D, TILE_ROWS, TILE_COLUMNS, COLUMN_TILES,
                    PRECISION,
                )  # fmt: skip
            else:
                result_YD, lse_Y = _attend(
                    q_YD, keys, values, token_Y - own_start, first_column, score_scale, past == 0,
                    BLOCK_D, TILE_ROWS, TILE_COLUMNS, COLUMN_TILES, PRECISION,
                )  # fmt: skip
            result_Y = store_partial(
                parts, result_YD, entry_Y, (entry_Y >> place_bits) + moved, valid_Y, head_Y, part,
                width, place_bits, PARTS, HEADS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            if dout is None:
                tl.store(part_lse + result_Y, lse_Y, mask=valid_Y)


@triton.jit(do_not_specialize=OUTPUT_NUMBERS)
def _merge_kernel(
    parts, part_lse, out, lse, counts, chunk, chunk_tokens, tokens, query_heads, lists, first_head,
    first_unit, width,
    HEADS: tl.constexpr, LIST_UNITS: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place_O, valid_O, count_O, result_O = output_rows(
        counts, chunk, chunk_tokens, tokens, query_heads, lists, first_head, first_unit, width,
        HEADS, LIST_UNITS, PARTS, ROWS,
    )  # fmt: skip
    dim_D = tl.arange(0, BLOCK_D)
    peak_O = tl.full([ROWS], float("-inf"), tl.float32)
    total_O = tl.zeros([ROWS], tl.float32)
    out_OD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for number in range(0, tl.max(count_O, 0)):
        there_O = number < count_O
        there_OD = there_O[:, None] & (dim_D < HEAD_DIM)[None, :]
        place_OD = result_O[:, None] * HEAD_DIM + dim_D[None, :]
        part_OD = tl.load(parts + place_OD, mask=there_OD, other=0.0)
        lse_O = tl.load(part_lse + result_O, mask=there_O, other=float("-inf"))
        new_peak_O = tl.maximum(peak_O, lse_O)
        base_O = tl.where(new_peak_O == float("-inf"), 0.0, new_peak_O)
        shrink_O, weight_O = tl.exp2(peak_O - base_O), tl.exp2(lse_O - base_O)
        total_O = total_O * shrink_O + weight_O
        out_OD = out_OD * shrink_O[:, None] + part_OD * weight_O[:, None]
        peak_O = new_peak_O
        result_O += HEADS
    # A row without keys: out 0, lse -inf.
    total_O = tl.where(total_O == 0.0, 1.0, total_O)
    tl.store(lse + place_O, (peak_O + tl.log2(total_O)) * LN_2, mask=valid_O)
    tl.store(out + place_O[:, None] * HEAD_DIM + dim_D[None, :],
             (out_OD / total_O[:, None]).to(out.dtype.element_ty),
             mask=valid_O[:, None] & (dim_D < HEAD_DIM)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=OUTPUT_NUMBERS)
def _sum_kernel(
    parts, dq, counts, chunk, chunk_tokens, tokens, query_heads, lists, first_head, first_unit,
    width, softmax_scale,
    HEADS: tl.constexpr, LIST_UNITS: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place_O, valid_O, count_O, result_O = output_rows(
        counts, chunk, chunk_tokens, tokens, query_heads, lists, first_head, first_unit, width,
        HEADS, LIST_UNITS, PARTS, ROWS,
    )  # fmt: skip
    dim_D = tl.arange(0, BLOCK_D)
    inside_D = dim_D < HEAD_DIM
    dq_OD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for number in range(0, tl.max(count_O, 0)):
        there_OD = (number < count_O)[:, None] & inside_D[None, :]
        place_OD = result_O[:, None] * HEAD_DIM + dim_D[None, :]
        dq_OD += tl.load(parts + place_OD, mask=there_OD, other=0.0)
        result_O += HEADS
    tl.store(dq + place_O[:, None] * HEAD_DIM + dim_D[None, :],
             (dq_OD * softmax_scale).to(dq.dtype.element_ty),
             mask=valid_O[:, None] & inside_D[None, :])  # fmt: skip
