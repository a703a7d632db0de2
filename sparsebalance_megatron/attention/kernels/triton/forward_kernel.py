# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Forward kernel: one program per tile of query rows, over its block's lists.

A query block's rows are ordered by head of the group, then token: a tile holds one head where a
block is at least a tile long, else several heads, which share the block's lists anyway. Past blocks
are full, hence need no mask; then come single columns, if the selection has any, whose keys are
gathered a tile at a time; the own block comes last, under the causal mask. Budgets are list lengths
read by the kernel, so a changed budget compiles nothing and stops nothing.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row; in kernels Y query rows of a tile, C columns (keys) of a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, capability_of, tiles_for
from sparsebalance_megatron.attention.selection import ColumnLists, Selection

LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))
_LARGEST_ROW_STRIDE = 1 << 23


def forward_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """out_THD in the inputs' dtype and lse_TH in float32, without a gradient.

    Lists need not hold their own block, so attention over parts of a list can be merged.
    """
    tokens, query_heads, head_dim = q_THD.shape
    kv_heads, layout = k_TGD.shape[1], selection.query_layout
    group = query_heads // kv_heads
    q_THD, k_TGD, v_TGD = (with_dense_rows(x) for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty(tokens, query_heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=q_THD.device)
    tile = tiles_for(head_dim, q_THD.element_size(), capability_of(q_THD.device)).forward
    rows = packed_rows(tile, group, layout.block_size)
    grid = (layout.blocks * kv_heads * (group * layout.block_size // rows),)
    with torch.cuda.device_of(q_THD):
        _forward_kernel[grid](
            q_THD,
            k_TGD,
            v_TGD,
            out_THD,
            lse_TH,
            selection.indices_QCK.contiguous(),
            selection.counts_QC.contiguous(),
            selection.own_block_N,
            layout.start_N,
            layout.document_end_N,
            selection.kv_layout.start_N,
            *column_arguments(selection),
            *(stride for x in (q_THD, k_TGD, v_TGD) for stride in x.stride()[:2]),
            softmax_scale * LOG2_E,
            layout.blocks,
            selection.indices_QCK.shape[2],
            KV_HEADS=kv_heads,
            GROUP=group,
            **tile_constants(q_THD, layout.block_size, rows, tile),
        )
    return out_THD, lse_TH


def with_dense_rows(x: Tensor) -> Tensor:
    """Give the same values with neighbouring head dims in neighbouring places.

    Rows keep a distance whose multiple within a tile takes 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(0) < _LARGEST_ROW_STRIDE else x.contiguous()


def listed_columns(selection: Selection) -> ColumnLists | None:
    """A selection's columns, contiguous; None where its lists have no places.

    Kernels are compiled apart for selections with columns and without.
    """
    columns = selection.columns
    if columns is None or columns.tokens_NGK.shape[2] == 0:
        return None
    return ColumnLists(
        tokens_NGK=columns.tokens_NGK.contiguous(), counts_NG=columns.counts_NG.contiguous()
    )


def column_arguments(
    selection: Selection,
) -> tuple[Tensor, Tensor, int] | tuple[None, None, None]:
    """Lists of columns, their lengths and places, as query-major kernels take them."""
    columns = listed_columns(selection)
    if columns is None:
        return None, None, None
    return columns.tokens_NGK, columns.counts_NG, columns.tokens_NGK.shape[2]


def packed_rows(tile: Tile, group: int, block_size: int) -> int:
    """Rows of a tile that cuts the group * block_size rows of a query block evenly."""
    rows = tile.rows
    while (group * block_size) % rows:
        rows //= 2
    return rows


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
def block_list(indices, counts, own_blocks, kv_starts, block, kv_head, width,
               KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Where a query block's list begins, its length, and 1 if the own block heads it, else 0; the
    first token of the block that heads it, and where a block 0 on its grid would begin.

    The blocks of a list lie on one grid, so the starts of the others need no look-up.
    """
    row = block.to(tl.int64) * KV_HEADS + kv_head
    count = tl.load(counts + row)
    entries = indices + row * width
    first = tl.load(entries, mask=count > 0, other=0)
    own = (count > 0) & (first == tl.load(own_blocks + block))
    first_start = tl.load(kv_starts + first)
    return entries, count, own.to(tl.int32), first_start, first_start - first * BLOCK_SIZE


@triton.jit
def entry_at(entries, place, count):
    """An entry of a list; 0 past its end.

    Loops load the entry of their next turn. Were it loaded in the turn that needs it, tiles could
    not be copied ahead of it, and the copy would be waited for right after it was started.
    """
    return tl.load(entries + place, mask=place < count, other=0)


@triton.jit
def column_list(columns, column_counts, column_width, block, kv_head, KV_HEADS: tl.constexpr):
    """Where a query block's list of columns begins, and its length."""
    row = block.to(tl.int64) * KV_HEADS + kv_head
    return columns + row * column_width, tl.load(column_counts + row)


@triton.jit
def column_tokens(entries, place_C, count):
    """Tokens of the keys' row that a list of columns names; 0 past its end.

    Loops load those of their next turn, for the reason of ``entry_at``.
    """
    return tl.load(entries + place_C, mask=place_C < count, other=0).to(tl.int64)


@triton.jit
def _online_softmax(q_YD, k_CD, v_CD, visible_YC, peak_Y, total_Y, out_YD, score_scale,
                    MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Take one tile of keys in. Scores are in units of log2."""
    s_YC = tl.dot(q_YD, tl.trans(k_CD), input_precision=PRECISION)
    if MASKED:
        s_YC = tl.where(visible_YC, s_YC, float("-inf"))
    new_peak_Y = tl.maximum(peak_Y, tl.max(s_YC, 1) * score_scale)
    p_YC = tl.exp2(s_YC * score_scale - new_peak_Y[:, None])
    shrink_Y = tl.exp2(peak_Y - new_peak_Y)
    total_Y = total_Y * shrink_Y + tl.sum(p_YC, 1)
    out_YD = out_YD * shrink_Y[:, None]
    out_YD = tl.dot(p_YC.to(v_CD.dtype), v_CD, out_YD, input_precision=PRECISION)
    return new_peak_Y, total_Y, out_YD


@triton.jit(do_not_specialize=["blocks", "width", "column_width"])
def _forward_kernel(
    q, k, v, out, lse, indices, counts, own_blocks, query_starts, query_ends, kv_starts,
    columns, column_counts, column_width,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    score_scale, blocks, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = GROUP * BLOCK_SIZE // TILE_ROWS
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    HEADS: tl.constexpr = KV_HEADS * GROUP
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
    column_C = tl.arange(0, TILE_COLUMNS)
    q_YD = load_rows(q + head_Y.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_Y, valid_Y,
                     True, HEAD_DIM, BLOCK_D)  # fmt: skip
    k_head = k + kv_head.to(tl.int64) * k_stride_G
    v_head = v + kv_head.to(tl.int64) * v_stride_G
    peak_Y = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total_Y = tl.zeros([TILE_ROWS], tl.float32)
    out_YD = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)

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
        peak_Y, total_Y, out_YD = _online_softmax(
            q_YD, k_CD, v_CD, True, peak_Y, total_Y, out_YD, score_scale, False, PRECISION
        )

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
            peak_Y, total_Y, out_YD = _online_softmax(
                q_YD, k_CD, v_CD, valid_C[None, :], peak_Y, total_Y, out_YD, score_scale, True,
                PRECISION,
            )  # fmt: skip

    last_slot = tl.minimum(first_slot + TILE_ROWS, BLOCK_SIZE)
    for first_column in range(0, own * tl.minimum(last_slot, length), TILE_COLUMNS):
        slot_C = first_column + column_C
        token_C = own_start + slot_C
        k_CD = load_rows(k_head, k_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        v_CD = load_rows(v_head, v_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        visible_YC = slot_C[None, :] <= slot_Y[:, None]
        peak_Y, total_Y, out_YD = _online_softmax(
            q_YD, k_CD, v_CD, visible_YC, peak_Y, total_Y, out_YD, score_scale, True, PRECISION
        )

    # A row without keys: out 0, lse -inf.
    out_YD = out_YD / tl.where(total_Y > 0.0, total_Y, 1.0)[:, None]
    lse_Y = tl.where(total_Y > 0.0, (peak_Y + tl.log2(total_Y)) * _LN_2, float("-inf"))
    place_Y = token_Y * HEADS + head_Y
    dim_D = tl.arange(0, BLOCK_D)
    tl.store(lse + place_Y, lse_Y, mask=valid_Y)
    tl.store(out + place_Y[:, None] * HEAD_DIM + dim_D[None, :], out_YD.to(out.dtype.element_ty),
             mask=valid_Y[:, None] & (dim_D < HEAD_DIM)[None, :])  # fmt: skip
