# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""dk and dv of single columns: partial sums by reader, then their sums by token.

The columns of a query block lie scattered, and so do the readers of a token. A program gathers
a tile of one query block's columns, keeps their keys and values, and streams the block's
queries past them; its results are final for this reader and are written in float32, by place of the
list. A second kernel adds up a token's results in the order of its readers. No two programs write
to one place, so that results repeat bit by bit. Query blocks are computed in chunks, which bound
the memory for partial sums.

Shape legend: T tokens of the packed sequence (of queries or of keys), X both side by side, N blocks
of the queries' sequence, K places of a list of columns, J query blocks of a chunk, E entries of a
chunk's lists, Z places of all query blocks, full or not, C columns (keys) of a tile, O entries of a
program; in kernels Y query rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LOG2_E,
    block_extent,
    load_rows,
    query_block_step,
    row_strides,
    tile_constants,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of
from sparsebalance_megatron.attention.selection import ColumnLists

PARTIAL_BYTES = 256 << 20
"""Most bytes of a chunk's partial sums, unless those of a single query block are more."""
_SUM_ROWS = 8


def add_column_gradients(
    dout_THF: Tensor,
    saved: Saved,
    statistics_2HZ: Tensor,
    dk_TGD: Tensor,
    dv_TGF: Tensor,
    columns: ColumnLists,
) -> None:
    """Add what the readers of columns give to dk and dv.

    Args:
        dout_THF: with dense rows, as q, k and v of ``saved``.
        statistics_2HZ: LSE and delta by query block, as the kernel for dq writes them.
        dk_TGD, dv_TGF: float32 and contiguous.
        columns: contiguous lists with at least one place.
    """
    q_THD, k_TGD, v_TGF = saved.q_THD, saved.k_TGD, saved.v_TGF
    query_layout = saved.selection.query_layout
    (_, kv_heads, head_dim), value_dim = k_TGD.shape, v_TGF.shape[2]
    part_dim, width = head_dim + value_dim, columns.tokens_NGK.shape[2]
    tile = tiles_of(k_TGD, v_TGF).key_gradient
    rows = min(tile.rows, query_layout.block_size)
    constants = tile_constants(k_TGD, v_TGF, query_layout.block_size, rows, tile)
    column_tiles = triton.cdiv(width, min(tile.columns, query_layout.block_size))
    chunk_blocks = min(
        query_layout.blocks, max(1, PARTIAL_BYTES // (4 * kv_heads * width * part_dim))
    )
    parts_EX = torch.empty(
        *(chunk_blocks * kv_heads * width, part_dim), dtype=torch.float32, device=k_TGD.device
    )
    for first_block in range(0, query_layout.blocks, chunk_blocks):
        chunk = slice(first_block, first_block + chunk_blocks)
        tokens_JGK, counts_JG = columns.tokens_NGK[chunk], columns.counts_NG[chunk]
        _column_gradient_kernel[(counts_JG.numel() * column_tiles,)](
            q_THD,
            k_TGD,
            v_TGF,
            dout_THF,
            statistics_2HZ,
            parts_EX,
            columns.tokens_NGK,
            columns.counts_NG,
            query_layout.start_N,
            query_layout.document_end_N,
            *row_strides(q_THD, k_TGD, v_TGF, dout_THF),
            saved.softmax_scale,
            first_block,
            query_layout.blocks,
            width,
            KV_HEADS=kv_heads,
            GROUP=q_THD.shape[1] // kv_heads,
            **constants,
        )
        source_E, length_E, row_E = _readers_by_row(tokens_JGK, counts_JG, k_TGD.shape[0])
        _column_sum_kernel[(triton.cdiv(len(source_E), _SUM_ROWS),)](
            parts_EX,
            dk_TGD,
            dv_TGF,
            source_E,
            length_E,
            row_E,
            len(source_E),
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            VALUE_DIM=value_dim,
            BLOCK_F=triton.next_power_of_2(value_dim),
            ROWS=_SUM_ROWS,
            enable_fp_fusion=True,
        )


def _readers_by_row(
    tokens_JGK: Tensor, counts_JG: Tensor, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's entries, sorted by row of dk: a token and a KV head.

    Returns:
        source_E: where the entry lies in the chunk's lists; of one row, readers rise.
        length_E: at the first entry of a row, how many it has; elsewhere, and past the last, 0.
        row_E: the row, ``token * G + head``; ``tokens * G`` past the last.
    """
    _, heads, width = tokens_JGK.shape
    device = tokens_JGK.device
    present_JGK = torch.arange(width, device=device) < counts_JG[..., None]
    row_JGK = tokens_JGK.long() * heads + torch.arange(heads, device=device)[:, None]
    nowhere = tokens * heads
    row_E, source_E = row_JGK.masked_fill_(~present_JGK, nowhere).flatten().sort(stable=True)
    end_E = torch.searchsorted(row_E, row_E, right=True)
    repeated_E = row_E.diff(prepend=row_E.new_full((1,), -1)) == 0
    length_E = end_E.sub_(torch.arange(len(row_E), device=device))
    return source_E, length_E.masked_fill_(repeated_E | (row_E == nowhere), 0), row_E


@triton.jit(do_not_specialize=["first_block", "query_blocks", "width"])
def _column_gradient_kernel(
    q, k, v, dout, statistics, parts, columns, column_counts, query_starts, query_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, first_block, query_blocks, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = BLOCK_SIZE // TILE_ROWS
    HEADS: tl.constexpr = KV_HEADS * GROUP
    # Neighbouring programs read the same queries, hence the cache.
    column_tiles = tl.cdiv(width, TILE_COLUMNS)
    place_C = (tl.program_id(0) % column_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    chunk_list = tl.program_id(0) // column_tiles
    block = first_block + chunk_list // KV_HEADS
    kv_head = chunk_list % KV_HEADS
    row = block.to(tl.int64) * KV_HEADS + kv_head
    count = tl.load(column_counts + row)
    if (tl.program_id(0) % column_tiles) * TILE_COLUMNS >= count:
        return

    score_scale = softmax_scale * LOG2_E
    start, length = block_extent(query_starts, query_ends, block, BLOCK_SIZE)
    valid_C = place_C < count
    token_C = tl.load(columns + row * width + place_C, mask=valid_C, other=0).to(tl.int64)
    k_CD = load_rows(k + kv_head.to(tl.int64) * k_stride_G, k_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    v_CF = load_rows(v + kv_head.to(tl.int64) * v_stride_G, v_stride_T, token_C, valid_C, True,
                     VALUE_DIM, BLOCK_F)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CF = tl.zeros([TILE_COLUMNS, BLOCK_F], tl.float32)
    for step in range(0, GROUP * ROW_TILES):
        head = kv_head * GROUP + step // ROW_TILES
        first_slot = (step % ROW_TILES) * TILE_ROWS
        dk_CD, dv_CF = query_block_step(
            q, dout, statistics, k_CD, v_CF, place_C, dk_CD, dv_CF, q_stride_T, q_stride_H,
            dout_stride_T, dout_stride_H, score_scale, start, first_slot, start + length, head,
            block, query_blocks, False, HEADS, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_F, BLOCK_SIZE,
            TILE_ROWS, PRECISION,
        )  # fmt: skip

    dim_D, dim_F = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_F)[None, :]
    entry_C = chunk_list.to(tl.int64) * width + place_C
    parts += (entry_C * (HEAD_DIM + VALUE_DIM))[:, None]
    valid_C1 = valid_C[:, None]
    tl.store(parts + dim_D, dk_CD * softmax_scale, mask=valid_C1 & (dim_D < HEAD_DIM))
    tl.store(parts + HEAD_DIM + dim_F, dv_CF, mask=valid_C1 & (dim_F < VALUE_DIM))


@triton.jit(do_not_specialize=["entries"])
def _column_sum_kernel(
    parts, dk, dv, sources, lengths, rows, entries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a row of dk, where its entries begin."""
    entry_O = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length_O = tl.load(lengths + entry_O, mask=entry_O < entries, other=0)
    dim_D, dim_F = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_F)[None, :]
    inside_D, inside_F = dim_D < HEAD_DIM, dim_F < VALUE_DIM
    dk_OD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_OF = tl.zeros([ROWS, BLOCK_F], tl.float32)
    for number in range(0, tl.max(length_O, 0)):
        there_O = number < length_O
        source_O = tl.load(sources + entry_O + number, mask=there_O, other=0)
        part_O1 = parts + (source_O * (HEAD_DIM + VALUE_DIM))[:, None]
        there_O1 = there_O[:, None]
        dk_OD += tl.load(part_O1 + dim_D, mask=there_O1 & inside_D, other=0.0)
        dv_OF += tl.load(part_O1 + HEAD_DIM + dim_F, mask=there_O1 & inside_F, other=0.0)
    first_O1 = (length_O > 0)[:, None]
    row_O1 = tl.load(rows + entry_O, mask=length_O > 0, other=0)[:, None]
    dk_OD += tl.load(dk + row_O1 * HEAD_DIM + dim_D, mask=first_O1 & inside_D, other=0.0)
    dv_OF += tl.load(dv + row_O1 * VALUE_DIM + dim_F, mask=first_O1 & inside_F, other=0.0)
    tl.store(dk + row_O1 * HEAD_DIM + dim_D, dk_OD, mask=first_O1 & inside_D)
    tl.store(dv + row_O1 * VALUE_DIM + dim_F, dv_OF, mask=first_O1 & inside_F)
