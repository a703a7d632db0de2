# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Backward pass over lists of query blocks, and its kernel for dk and dv of blocks.

Nothing is added from two programs to one place, so results repeat bit by bit. The gradient of a KV
block sums over the heads of its group inside one program. A long list of readers is cut into items;
their float32 parts are added in a second pass, in the order of the list.

The columns of a query block lie scattered, and so do the readers of a token. A program gathers a
tile of one query block's columns, keeps their keys and values, and streams the block's queries past
them; its results are final for this reader and are written in float32, by place of the list. A
second kernel adds up a token's results in the order of its readers. Query blocks are computed in
chunks, which bound the memory for partial sums.

Shape legend: X dk and dv side by side, I items, B tokens of a block, J query blocks of a chunk, E
entries of a chunk's lists, Z places of all query blocks, full or not; in kernels C columns (keys)
of a tile, O entries of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LOG2_E,
    block_extent,
    entry_at,
    key_gradients,
    load_rows,
    query_block_step,
    row_strides,
    store_key_gradients,
    tile_constants,
)
from sparsebalance_megatron.attention.kernels.triton.query_block_kernel import (
    listed_columns,
    query_gradient,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of
from sparsebalance_megatron.attention.selection import ColumnLists

PARTIAL_BYTES = 256 << 20
"""Most bytes of a chunk's partial sums, unless those of a single query block are more."""
_SUM_ROWS = 8


def gradients(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGF in the inputs' dtype."""
    k_dtype, columns = saved.k_TGD.dtype, listed_columns(saved.selection)
    dq_THD, statistics_2HZ = query_gradient(dout_THF, saved)
    # What columns add is rounded to the inputs' dtype once, with the rest.
    dtype = k_dtype if columns is None else torch.float32
    layout = saved.selection.query_layout
    own = {"query_ends": layout.document_end_N, "query_blocks": layout.blocks}
    dk_TGD, dv_TGF, _ = key_gradients(
        _key_block_kernel, dout_THF, saved, [statistics_2HZ], own, dtype
    )
    if columns is not None:
        add_column_gradients(dout_THF, saved, statistics_2HZ, dk_TGD, dv_TGF, columns)
    return dq_THD, dk_TGD.to(k_dtype), dv_TGF.to(k_dtype)


@triton.jit(do_not_specialize=["query_blocks", "blocks", "entries_per_item", "tiles"])
def _key_block_kernel(
    q, k, v, dout, statistics, dk, dv, parts, bounds, entries, item_list, item_part, item_slot,
    own_blocks, query_starts, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, blocks, entries_per_item, tiles,
    query_ends, query_blocks,
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
    kv_head = inverse_list // blocks
    block = inverse_list % blocks
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    if first_column >= length:
        return

    score_scale = softmax_scale * LOG2_E
    bounds += inverse_list.to(tl.int64) * tiles
    begin = tl.load(bounds) + tl.load(item_part + item) * entries_per_item
    stop = tl.minimum(begin + entries_per_item, tl.load(bounds + tiles))
    # Readers rise, and none comes before the block: its own queries are the first, if they read it.
    # They lie on one grid, so the starts of the others need no look-up; all but the last are full.
    readers = entries + begin
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


def add_column_gradients(
    dout_THF: Tensor,
    saved: Saved,
    statistics_2HZ: Tensor,
    dk_TGD: Tensor,
    dv_TGF: Tensor,
    columns: ColumnLists,
) -> None:
    """Add what the readers of columns give to dk and dv, which are float32 and contiguous.

    ``statistics_2HZ`` are LSE and delta by query block, as the kernel for dq writes them; lists of
    columns are contiguous and have a place.
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
    shape = chunk_blocks * kv_heads * width, part_dim
    parts_EX = torch.empty(shape, dtype=torch.float32, device=k_TGD.device)
    for first_block in range(0, query_layout.blocks, chunk_blocks):
        chunk = slice(first_block, first_block + chunk_blocks)
        tokens_JGK, counts_JG = columns.tokens_NGK[chunk], columns.counts_NG[chunk]
        _column_gradient_kernel[(counts_JG.numel() * column_tiles,)](
            *(q_THD, k_TGD, v_TGF, dout_THF, statistics_2HZ, parts_EX),
            *(columns.tokens_NGK, columns.counts_NG),
            *(query_layout.start_N, query_layout.document_end_N),
            *row_strides(q_THD, k_TGD, v_TGF, dout_THF),
            *(saved.softmax_scale, first_block, query_layout.blocks, width),
            KV_HEADS=kv_heads,
            GROUP=q_THD.shape[1] // kv_heads,
            **constants,
        )
        source_E, length_E, row_E = _readers_by_row(tokens_JGK, counts_JG, k_TGD.shape[0])
        _column_sum_kernel[(triton.cdiv(len(source_E), _SUM_ROWS),)](
            *(parts_EX, dk_TGD, dv_TGF, source_E, length_E, row_E, len(source_E)),
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
