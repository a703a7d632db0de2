# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Forward kernels for lists by token: tiles of the tokens that chose a KV block, then a merge.

A program keeps the keys and values of its block and streams the queries that chose it; each entry
of a list gets its partial result, and a second kernel merges a token's in the order of its list.
Accumulators that a program reads back from memory would save the second kernel, but need a barrier
in the loop, which stops the compiler from copying ahead and which Triton's interpreter cannot
check; between two kernels the order is certain.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, K places of a list;
in kernels Y query rows of a tile (token by token, heads side by side), C columns (keys) of a tile,
O rows of output.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.forward_kernel import (
    LOG2_E,
    block_extent,
    entry_at,
    load_rows,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import capability_of, token_tiles_for
from sparsebalance_megatron.attention.kernels.triton.token_lists import TILES_PER_ITEM, head_slices
from sparsebalance_megatron.attention.kernels.triton.token_partials import (
    OUTPUT_NUMBERS,
    RUN_TIME_NUMBERS,
    PartialShape,
    item_entries,
    output_rows,
    own_prefix,
    resident_tiles,
    row_places,
    store_partial,
)
from sparsebalance_megatron.attention.selection import Selection

_LN_2 = tl.constexpr(math.log(2.0))
_TILES = tl.constexpr(TILES_PER_ITEM)


def forward_by_token(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in the inputs' dtype and lse_TH in float32, without a gradient.

    Lists need not hold their own block, so attention over parts of a list can be merged.
    """
    tokens, query_heads, head_dim = q_THD.shape
    q_THD, k_TGD, v_TGD = (with_dense_rows(x) for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty(tokens, query_heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=q_THD.device)
    counts_TC = selection.counts_QC.contiguous()
    capability = capability_of(q_THD.device)
    tile = token_tiles_for(head_dim, q_THD.element_size(), capability).forward
    with torch.cuda.device_of(q_THD):
        for slices in head_slices(selection, query_heads, k_TGD.shape[1], tile.rows):
            shape = PartialShape.of(q_THD, selection, tile, slices[0].heads, streamed=1)
            lists = shape.lists(selection, slices[0].selecting_head)
            parts, part_lse = (shape.buffer(lists, n, q_THD.device) for n in (head_dim, 1))
            for heads, chunk in itertools.product(slices, range(lists.entries.chunks)):
                _token_forward_kernel[(lists.items * shape.parts,)](
                    q_THD,
                    k_TGD,
                    v_TGD,
                    parts,
                    part_lse,
                    *shape.work(lists, selection, heads, chunk),
                    *(stride for x in (q_THD, k_TGD, v_TGD) for stride in x.stride()[:2]),
                    softmax_scale * LOG2_E,
                    **shape.constants(),
                )
                _merge_kernel[shape.output_grid(lists)](
                    parts,
                    part_lse,
                    out_THD,
                    lse_TH,
                    counts_TC,
                    *shape.output(lists, heads, chunk, tokens, query_heads, counts_TC.shape[1]),
                    **shape.output_constants(),
                )
    return out_THD, lse_TH


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


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def _token_forward_kernel(
    q, k, v, parts, part_lse, entries, bounds, item_list, item_part, own_blocks, token_blocks,
    query_starts, kv_starts, kv_ends, first_head, kv_head, chunk, chunks, chunk_tokens, items,
    width, place_bits, q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    score_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, COLUMN_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK_SIZE // (TILE_COLUMNS * COLUMN_TILES)
    TOKENS: tl.constexpr = TILE_ROWS // HEADS
    item = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    block = tl.load(item_list + chunk.to(tl.int64) * items + item)
    if block < 0:
        return
    begin, count = item_entries(
        bounds, item_part, block, chunk, chunks, items, item, TOKENS * _TILES
    )
    entries += begin
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    masked, own_start = own_prefix(entries, count, own_blocks, token_blocks, query_starts, block,
                                   length, place_bits, TOKENS)  # fmt: skip
    first_column = part * (TILE_COLUMNS * COLUMN_TILES)
    k += kv_head.to(tl.int64) * k_stride_G
    v += kv_head.to(tl.int64) * v_stride_G
    keys = resident_tiles((), k, k_stride_T, start, length, first_column, HEAD_DIM, BLOCK_D,
                          TILE_COLUMNS, COLUMN_TILES)  # fmt: skip
    values = resident_tiles((), v, v_stride_T, start, length, first_column, HEAD_DIM, BLOCK_D,
                            TILE_COLUMNS, COLUMN_TILES)  # fmt: skip

    head_Y, place_Y = row_places(HEADS, TILE_ROWS)
    q += (first_head + head_Y).to(tl.int64)[:, None] * q_stride_H
    first_token = chunk.to(tl.int64) * chunk_tokens
    next_Y = entry_at(entries, place_Y, count)
    for tile in range(0, masked):
        entry_Y, valid_Y = next_Y, place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        token_Y = (entry_Y >> place_bits).to(tl.int64)
        q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        out_YD, lse_Y = _attend(
            q_YD, keys, values, token_Y - own_start, first_column, score_scale, True, BLOCK_D,
            TILE_ROWS, TILE_COLUMNS, COLUMN_TILES, PRECISION,
        )  # fmt: skip
        result_Y = store_partial(parts, out_YD, entry_Y, token_Y, valid_Y, head_Y, part,
                                 first_token, width, place_bits, PARTS, HEADS, HEAD_DIM,
                                 BLOCK_D)  # fmt: skip
        tl.store(part_lse + result_Y, lse_Y, mask=valid_Y)
    for tile in range(masked, tl.cdiv(count, TOKENS)):
        entry_Y, valid_Y = next_Y, place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        token_Y = (entry_Y >> place_bits).to(tl.int64)
        q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        out_YD, lse_Y = _attend(
            q_YD, keys, values, token_Y, first_column, score_scale, False, BLOCK_D, TILE_ROWS,
            TILE_COLUMNS, COLUMN_TILES, PRECISION,
        )  # fmt: skip
        result_Y = store_partial(parts, out_YD, entry_Y, token_Y, valid_Y, head_Y, part,
                                 first_token, width, place_bits, PARTS, HEADS, HEAD_DIM,
                                 BLOCK_D)  # fmt: skip
        tl.store(part_lse + result_Y, lse_Y, mask=valid_Y)


@triton.jit(do_not_specialize=OUTPUT_NUMBERS)
def _merge_kernel(
    parts, part_lse, out, lse, counts, chunk, chunk_tokens, tokens, query_heads, selecting_heads,
    selecting_head, first_head, width,
    HEADS: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    place_O, valid_O, count_O, result_O = output_rows(
        counts, chunk, chunk_tokens, tokens, query_heads, selecting_heads, selecting_head,
        first_head, width, HEADS, PARTS, ROWS,
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
    tl.store(lse + place_O, (peak_O + tl.log2(total_O)) * _LN_2, mask=valid_O)
    tl.store(out + place_O[:, None] * HEAD_DIM + dim_D[None, :],
             (out_OD / total_O[:, None]).to(out.dtype.element_ty),
             mask=valid_O[:, None] & (dim_D < HEAD_DIM)[None, :])  # fmt: skip
