# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Attention over lists by token: tiles of the readers that chose a KV block.

Lists of neighbouring tokens differ, so the readers of a block are gathered into dense tiles. A
program takes a chunk of the readers of one KV head past all blocks that they read, block by block,
and keeps what it knows of every row, in float32, in memory of its own: a row meets its blocks in
several tiles. What a tile stores, a later one of the same program loads, behind a barrier; no other
program reads or writes it, so there are no atomics and results repeat bit by bit. That memory is
bounded, and a launch takes as many programs as it allows.

dq goes as the forward pass does. dk and dv stay in registers while a program streams the readers
that chose its block, of all heads that read its KV head; long lists are cut into items, whose
float32 parts are added in order.

Shape legend: U of a result (F of out, D of dq), E dk and dv side by side, I items, B tokens of a
block, C columns (keys) of a tile, O rows of a program; in kernels Y rows of a tile (reader by
reader, the query heads of its list side by side).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LN_2,
    LOG2_E,
    block_extent,
    entry_at,
    key_gradients,
    key_step,
    load_rows,
    row_strides,
    store_key_gradients,
    tile_constants,
)
from sparsebalance_megatron.attention.kernels.triton.index import Readers
from sparsebalance_megatron.attention.kernels.triton.query_block_kernel import take_in
from sparsebalance_megatron.attention.kernels.triton.tiles import tiles_of
from sparsebalance_megatron.attention.selection import Selection

PARTIAL_BYTES = 512 << 20
"""Most bytes of a launch's rows, unless those of a single program are more."""
WANTED_PROGRAMS = 1024
"""Programs that fill a device of 132 multiprocessors a few times over, where rows are that many."""
_DELTA_ROWS = 32
_RUN_TIME_NUMBERS = [
    "blocks", "readers", "shared", "tiles", "chunk_tiles", "tile_readers", "first_program",
    "programs",
]  # fmt: skip


def launch(
    selection: Selection,
    entries: Readers,
    tensors: tuple[Tensor | None, ...],
    softmax_scale: float,
) -> None:
    """Launch the kernel with ``tensors``, its first arguments, for all readers.

    A program's chunk of readers fills a tile with what they read of a block; chunks are so many
    that their programs fill the device, and a launch takes as many as its rows' memory allows.
    """
    q_THD, k_TGD, v_TGF, dout_THF, *_ = tensors
    assert q_THD is not None and k_TGD is not None and v_TGF is not None
    tiles = tiles_of(k_TGD, v_TGF)
    tile = tiles.forward if dout_THF is None else tiles.query_gradient
    scale = softmax_scale * (float(LOG2_E.value) if dout_THF is None else 1.0)
    query_heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
    result_dim = v_TGF.shape[2] if dout_THF is None else q_THD.shape[2]
    query_layout, kv_layout = selection.query_layout, selection.kv_layout
    _, lists, width = selection.indices_QCK.shape
    group, shared, heads = query_heads // kv_heads, lists // kv_heads, query_heads // lists
    filling = -(-tile.rows * -(-kv_layout.max_blocks // width) // heads)
    wanted_readers = max(filling, entries.readers * kv_heads // WANTED_PROGRAMS)
    chunk_tiles = min(entries.tiles, -(-wanted_readers // entries.tile_readers))
    rows = chunk_tiles * entries.tile_readers * heads
    programs = kv_heads * -(-entries.tiles // chunk_tiles)
    at_once = min(programs, max(1, PARTIAL_BYTES // (4 * rows * (result_dim + 2))))
    rows_OU = torch.empty(at_once * rows, result_dim, dtype=torch.float32, device=q_THD.device)
    state_2O = torch.empty(2, len(rows_OU), dtype=torch.float32, device=q_THD.device)
    for first in range(0, programs, at_once):
        _reader_kernel[(min(at_once, programs - first),)](
            *tensors,
            *(rows_OU, *state_2O, entries.readers_E, entries.bounds_J),
            *(selection.own_block_N, query_layout.block_T, query_layout.start_N),
            *(kv_layout.start_N, kv_layout.document_end_N, kv_layout.document_first_N),
            *row_strides(q_THD, k_TGD, v_TGF),
            *((None, None) if dout_THF is None else row_strides(dout_THF)),
            *(scale, kv_layout.blocks, entries.readers, shared, entries.tiles, chunk_tiles),
            *(entries.tile_readers, first, programs),
            WITHIN=query_layout is kv_layout,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEADS=heads,
            **tile_constants(k_TGD, v_TGF, kv_layout.block_size, tile.rows, tile),
        )


@triton.jit
def _take_block_in(
    q, k, v, dout, lse, delta, rows, peaks, totals, entries, count, reader_rows, start, length,
    own_start, first_tile, past_tile, q_stride_T, q_stride_H, k_stride_T, v_stride_T,
    dout_stride_T, dout_stride_H, score_scale, first_head, shared, OWN: tl.constexpr,
    HEADS: tl.constexpr, QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one block in, for some tiles of the rows that read it.

    ``OWN``: the rows may be the block's own; else they lie behind it, and it is full.
    """
    RESULT_DIM: tl.constexpr = VALUE_DIM if dout is None else HEAD_DIM
    BLOCK_U: tl.constexpr = BLOCK_F if dout is None else BLOCK_D
    dim_U, column_C = tl.arange(0, BLOCK_U), tl.arange(0, TILE_COLUMNS)
    for tile in range(first_tile, past_tile):
        row_Y = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        valid_Y = row_Y < count * HEADS
        reader_Y = tl.load(entries + row_Y // HEADS, mask=valid_Y, other=0)
        token_Y = (reader_Y // shared).to(tl.int64)
        head_Y = first_head + (reader_Y % shared) * HEADS + row_Y % HEADS
        place_Y = tl.where(valid_Y, reader_Y * HEADS + row_Y % HEADS - reader_rows, 0)
        place_YU = place_Y[:, None] * RESULT_DIM + dim_U[None, :]
        q_YD = load_rows(q + head_Y.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_Y,
                         valid_Y, True, HEAD_DIM, BLOCK_D)  # fmt: skip
        # A row that has read nothing yet has a total of 0, and undefined sums.
        total_Y = tl.load(totals + place_Y, mask=valid_Y, other=0.0)
        inside_YU = valid_Y[:, None] & (dim_U < RESULT_DIM)[None, :]
        result_YU = tl.load(rows + place_YU, mask=inside_YU & (total_Y != 0.0)[:, None], other=0.0)
        if dout is not None:
            dout_YF = load_rows(dout + head_Y.to(tl.int64)[:, None] * dout_stride_H, dout_stride_T,
                                token_Y, valid_Y, True, VALUE_DIM, BLOCK_F)  # fmt: skip
            statistic_Y = token_Y * QUERY_HEADS + head_Y
            peak_Y = tl.load(lse + statistic_Y, mask=valid_Y, other=0.0) * LOG2_E
            total_Y = tl.load(delta + statistic_Y, mask=valid_Y, other=0.0)
        else:
            dout_YF = None
            peak_Y = tl.load(peaks + place_Y, mask=valid_Y & (total_Y != 0.0), other=float("-inf"))
        for first_column in range(0, length if OWN else BLOCK_SIZE, TILE_COLUMNS):
            slot_C = first_column + column_C
            k_CD = load_rows(k + (start + first_column) * k_stride_T, k_stride_T, column_C,
                             slot_C < length, OWN, HEAD_DIM, BLOCK_D)  # fmt: skip
            v_CF = load_rows(v + (start + first_column) * v_stride_T, v_stride_T, column_C,
                             slot_C < length, OWN, VALUE_DIM, BLOCK_F)  # fmt: skip
            visible_YC = slot_C[None, :] <= (token_Y - own_start)[:, None]
            peak_Y, total_Y, result_YU = take_in(
                q_YD, dout_YF, k_CD, v_CF, visible_YC, peak_Y, total_Y, result_YU, score_scale,
                OWN, PRECISION,
            )  # fmt: skip
        # A thread may load what another one stores: the compiler chooses a layout for each access.
        tl.debug_barrier()
        tl.store(rows + place_YU, result_YU, mask=inside_YU)
        if dout is not None:
            tl.store(totals + place_Y, tl.full([TILE_ROWS], 1.0, tl.float32), mask=valid_Y)
        else:
            tl.store(peaks + place_Y, peak_Y, mask=valid_Y)
            tl.store(totals + place_Y, total_Y, mask=valid_Y)
        # A later tile of this program may hold these rows, in other threads.
        tl.debug_barrier()


@triton.jit(do_not_specialize=_RUN_TIME_NUMBERS)
def _reader_kernel(
    q, k, v, dout, out, lse, delta, rows, peaks, totals, entries, bounds, own_blocks, token_blocks,
    query_starts, kv_starts, kv_ends, kv_firsts,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, scale, blocks, readers, shared, tiles, chunk_tiles, tile_readers,
    first_program, programs,
    WITHIN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out and lse; or, with dout, dq in place of out.

    ``scale``: of scores, in units of log2 for the forward pass. ``WITHIN``: queries and keys lie in
    one sequence, where a chunk reads no block before its first document's nor after its last own.
    """
    QUERY_HEADS: tl.constexpr = KV_HEADS * GROUP
    RESULT_DIM: tl.constexpr = VALUE_DIM if dout is None else HEAD_DIM
    BLOCK_U: tl.constexpr = BLOCK_F if dout is None else BLOCK_D
    # Late tokens read most blocks, and start first.
    program = programs - 1 - first_program - tl.program_id(0)
    kv_head, first_tile = program % KV_HEADS, (program // KV_HEADS) * chunk_tiles
    past_tile = tl.minimum(first_tile + chunk_tiles, tiles)
    first_reader = first_tile * tile_readers
    past_reader = tl.minimum(past_tile * tile_readers, readers)
    chunk_rows = (past_reader - first_reader) * HEADS
    first_row = tl.program_id(0).to(tl.int64) * (chunk_tiles * tile_readers * HEADS)
    rows += first_row * RESULT_DIM
    peaks += first_row
    totals += first_row
    row_O = tl.arange(0, TILE_ROWS)
    for row in range(0, chunk_rows, TILE_ROWS):
        tl.store(totals + row + row_O, tl.zeros([TILE_ROWS], tl.float32),
                 mask=row + row_O < chunk_rows)  # fmt: skip
    tl.debug_barrier()

    score_scale = scale if dout is None else scale * LOG2_E
    first_head = kv_head * GROUP
    k += kv_head.to(tl.int64) * k_stride_G
    v += kv_head.to(tl.int64) * v_stride_G
    if WITHIN:
        first_block = tl.load(kv_firsts + tl.load(token_blocks + first_reader // shared))
        past_block = tl.load(token_blocks + (past_reader - 1) // shared) + 1
    else:
        first_block, past_block = tl.zeros([], tl.int64), blocks.to(tl.int64)
    for block in range(first_block, past_block):
        bound = bounds + (kv_head * blocks + block) * tiles
        begin = tl.load(bound + first_tile)
        count = tl.load(bound + past_tile) - begin
        if count > 0:
            start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
            # Readers rise and none comes before the block, so that its own tokens come first. Later
            # ones lie a whole block behind the first, hence see all of it even where a tile mixes
            # both.
            query_block = tl.load(token_blocks + tl.load(entries + begin) // shared)
            own = (tl.load(own_blocks + query_block) == block).to(tl.int32)
            own_start = tl.load(query_starts + query_block)
            all_tiles = tl.cdiv(count * HEADS, TILE_ROWS)
            own_tiles = own * tl.minimum(tl.cdiv(length * shared * HEADS, TILE_ROWS), all_tiles)
            for past in tl.static_range(2):
                _take_block_in(
                    q, k, v, dout, lse, delta, rows, peaks, totals, entries + begin, count,
                    first_reader * HEADS, start, length, own_start, own_tiles if past else 0,
                    all_tiles if past else own_tiles, q_stride_T, q_stride_H, k_stride_T,
                    v_stride_T, dout_stride_T, dout_stride_H, score_scale, first_head, shared,
                    past == 0, HEADS, QUERY_HEADS, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_F,
                    BLOCK_SIZE, TILE_ROWS, TILE_COLUMNS, PRECISION,
                )  # fmt: skip

    dim_U = tl.arange(0, BLOCK_U)
    for row in range(0, chunk_rows, TILE_ROWS):
        place_O = row + row_O
        inside_O = place_O < chunk_rows
        reader_O = first_reader + place_O // HEADS
        head_O = first_head + (reader_O % shared) * HEADS + place_O % HEADS
        output_O = (reader_O // shared).to(tl.int64) * QUERY_HEADS + head_O
        inside_OU = inside_O[:, None] & (dim_U < RESULT_DIM)[None, :]
        total_O = tl.load(totals + place_O, mask=inside_O, other=0.0)
        result_OU = tl.load(rows + place_O[:, None] * RESULT_DIM + dim_U[None, :],
                            mask=inside_OU & (total_O != 0.0)[:, None], other=0.0)  # fmt: skip
        if dout is not None:
            result_OU *= scale
        else:
            # A row without keys: out 0, lse -inf.
            peak_O = tl.load(peaks + place_O, mask=inside_O, other=0.0)
            lse_O = tl.where(total_O != 0.0, (peak_O + tl.log2(total_O)) * LN_2, float("-inf"))
            tl.store(lse + output_O, lse_O, mask=inside_O)
            result_OU /= tl.where(total_O != 0.0, total_O, 1.0)[:, None]
        tl.store(out + output_O[:, None] * RESULT_DIM + dim_U[None, :],
                 result_OU.to(out.dtype.element_ty), mask=inside_OU)  # fmt: skip


def gradients(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGF in the inputs' dtype."""
    selection, lists = saved.selection, saved.selection.counts_QC.shape[1]
    statistics = saved.lse_TH, _delta(dout_THF, saved.out_THF)
    own = {
        "token_blocks": selection.query_layout.block_T,
        "shared": lists // saved.k_TGD.shape[1],
        "HEADS": saved.q_THD.shape[1] // lists,
    }
    dk_TGD, dv_TGF, readers = key_gradients(
        _token_key_kernel, dout_THF, saved, statistics, own, saved.k_TGD.dtype
    )
    dq_THD = torch.empty(saved.q_THD.shape, dtype=saved.q_THD.dtype, device=saved.q_THD.device)
    tensors = saved.q_THD, saved.k_TGD, saved.v_TGF, dout_THF, dq_THD, *statistics
    launch(selection, readers, tensors, saved.softmax_scale)
    return dq_THD, dk_TGD, dv_TGF


def _delta(dout_THF: Tensor, out_THF: Tensor) -> Tensor:
    """delta_TH: the sum over F of dout * out, float32."""
    tokens, query_heads, value_dim = out_THF.shape
    delta_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=out_THF.device)
    _delta_kernel[(triton.cdiv(delta_TH.numel(), _DELTA_ROWS),)](
        *(dout_THF, out_THF, delta_TH, *row_strides(dout_THF), tokens),
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
    own_blocks, query_starts, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, blocks, entries_per_item, tiles,
    token_blocks, shared,
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
