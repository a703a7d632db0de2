# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Backward kernels for lists by token.

dq goes as the forward pass does: a partial result for every entry, summed in the order of the list.
dk and dv stay in registers while a program streams the tokens that chose its block; long lists are
cut into items, whose float32 parts are added in order. Where several slices of query heads share a
KV head, they add to the same sums one launch after the other.

Shape legend: T tokens of the packed row (X: of the keys'), H query heads, G KV heads, D head dim,
I items, B tokens of a block; in kernels Y query rows of a tile (token by token, heads side by
side), C columns (keys) of a tile, O rows of output.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.backward_kernels import (
    WANTED_PROGRAMS,
    add_parts,
)
from sparsebalance_megatron.attention.kernels.triton.forward_kernel import (
    LOG2_E,
    block_extent,
    entry_at,
    load_rows,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.index import SortedEntries, inverse_lists
from sparsebalance_megatron.attention.kernels.triton.tiles import (
    Tile,
    capability_of,
    token_tiles_for,
)
from sparsebalance_megatron.attention.kernels.triton.token_lists import (
    TILES_PER_ITEM,
    ChunkedLists,
    HeadSlice,
    head_slices,
)
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

_LOG2_E = tl.constexpr(LOG2_E)
_TILES = tl.constexpr(TILES_PER_ITEM)
_DELTA_ROWS = 32


def backward_by_token(dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGD in the inputs' dtype."""
    with torch.cuda.device_of(dout_THD):
        return _Backward(dout_THD, saved).gradients()


class _Backward:
    """One backward pass: its tensors, and the launches over them."""

    def __init__(self, dout_THD: Tensor, saved: Saved) -> None:
        inputs = saved.q_THD, saved.k_TGD, saved.v_TGD, dout_THD
        self._q_THD, self._k_TGD, self._v_TGD, self._dout_THD = map(with_dense_rows, inputs)
        self._selection, self._softmax_scale = saved.selection, saved.softmax_scale
        self._counts_TC = saved.selection.counts_QC.contiguous()
        self._lse_TH = saved.lse_TH.contiguous()
        self._delta_TH = _delta(self._dout_THD, saved.out_THD.contiguous())
        self._strides = [
            stride
            for x in (self._q_THD, self._k_TGD, self._v_TGD, self._dout_THD)
            for stride in x.stride()[:2]
        ]

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq_THD, dk_TGD and dv_TGD."""
        q_THD, k_TGD = self._q_THD, self._k_TGD
        query_heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
        selecting_heads = self._counts_TC.shape[1]
        capability = capability_of(q_THD.device)
        tiles = token_tiles_for(q_THD.shape[2], q_THD.element_size(), capability)
        dq_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        dk_TGD, dv_TGD = (
            torch.empty(k_TGD.shape, dtype=k_TGD.dtype, device=k_TGD.device) for _ in range(2)
        )
        sums_2XD = torch.empty(
            2, k_TGD.shape[0], k_TGD.shape[2], dtype=torch.float32, device=k_TGD.device
        )
        most = min(tiles.query_gradient.rows, tiles.key_gradient.rows)
        for slices in head_slices(self._selection, query_heads, kv_heads, most):
            first = slices[0]
            shape = PartialShape.of(
                q_THD, self._selection, tiles.query_gradient, first.heads, streamed=2
            )
            lists = shape.lists(self._selection, first.selecting_head)
            self._query_gradient(dq_THD, shape, lists, slices)
            begins, ends = (
                head * kv_heads % selecting_heads == 0
                for head in (first.selecting_head, first.selecting_head + 1)
            )
            self._add_key_gradient(
                sums_2XD, lists.entries, slices, tiles.key_gradient, fresh=begins
            )
            if ends:
                dk_TGD[:, first.kv_head], dv_TGD[:, first.kv_head] = sums_2XD
        return dq_THD, dk_TGD, dv_TGD

    def _query_gradient(
        self,
        dq_THD: Tensor,
        shape: PartialShape,
        lists: ChunkedLists,
        slices: list[HeadSlice],
    ) -> None:
        tokens, query_heads, head_dim = dq_THD.shape
        parts = shape.buffer(lists, head_dim, dq_THD.device)
        for heads, chunk in itertools.product(slices, range(lists.entries.chunks)):
            _token_query_gradient_kernel[(lists.items * shape.parts,)](
                self._q_THD,
                self._k_TGD,
                self._v_TGD,
                self._dout_THD,
                self._lse_TH,
                self._delta_TH,
                parts,
                *shape.work(lists, self._selection, heads, chunk),
                *self._strides,
                self._softmax_scale,
                query_heads,
                **shape.constants(),
            )
            _sum_kernel[shape.output_grid(lists)](
                parts,
                dq_THD,
                self._counts_TC,
                *shape.output(lists, heads, chunk, tokens, query_heads, self._counts_TC.shape[1]),
                self._softmax_scale,
                **shape.output_constants(),
            )

    def _add_key_gradient(
        self,
        sums_2XD: Tensor,
        entries: SortedEntries,
        slices: list[HeadSlice],
        tile: Tile,
        *,
        fresh: bool,
    ) -> None:
        """Add what the slices of a selecting head give, or begin with it."""
        selection = self._selection
        layout, head_dim = selection.kv_layout, sums_2XD.shape[2]
        columns = min(tile.columns, layout.block_size)
        column_tiles = layout.block_size // columns
        head = slices[0].selecting_head
        lists = inverse_lists(
            selection.of_head(head, selection.counts_QC.shape[1]),
            wanted_items=-(-WANTED_PROGRAMS // column_tiles),
            entries=entries,
        )
        parts_I2BD = torch.empty(
            lists.cut_items,
            2,
            layout.block_size,
            head_dim,
            dtype=torch.float32,
            device=sums_2XD.device,
        )
        for heads in slices:
            accumulate = not (fresh and heads is slices[0])
            _token_key_gradient_kernel[(lists.items * column_tiles,)](
                self._q_THD,
                self._k_TGD,
                self._v_TGD,
                self._dout_THD,
                self._lse_TH,
                self._delta_TH,
                sums_2XD,
                parts_I2BD,
                lists.offsets_U,
                lists.queries_E,
                lists.item_list_I,
                lists.item_part_I,
                lists.item_parts_I,
                selection.own_block_N,
                selection.query_layout.block_T,
                selection.query_layout.start_N,
                layout.start_N,
                layout.document_end_N,
                *self._strides,
                self._softmax_scale,
                heads.first,
                heads.kv_head,
                self._q_THD.shape[1],
                sums_2XD.shape[1],
                lists.entries_per_item,
                entries.place_bits,
                ACCUMULATE=accumulate,
                HEADS=heads.heads,
                HEAD_DIM=head_dim,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
                BLOCK_SIZE=layout.block_size,
                TILE_ROWS=tile.rows,
                TILE_COLUMNS=columns,
                PRECISION="ieee",
                num_warps=tile.warps,
                num_stages=tile.stages,
                enable_fp_fusion=True,
            )
            if lists.cut_lists:
                dk_X1D, dv_X1D = sums_2XD.unsqueeze(2)
                add_parts(lists, parts_I2BD, dk_X1D, dv_X1D, selection, accumulate=accumulate)


def _delta(dout_THD: Tensor, out_THD: Tensor) -> Tensor:
    """delta_TH: the sum over D of dout * out, float32."""
    tokens, query_heads, head_dim = out_THD.shape
    delta_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=out_THD.device)
    _delta_kernel[(triton.cdiv(delta_TH.numel(), _DELTA_ROWS),)](
        dout_THD,
        out_THD,
        delta_TH,
        *dout_THD.stride()[:2],
        tokens,
        HEADS=query_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=_DELTA_ROWS,
        enable_fp_fusion=True,
    )
    return delta_TH


@triton.jit(do_not_specialize=["tokens"])
def _delta_kernel(
    dout, out, delta, dout_stride_T, dout_stride_H, tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_O = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid_O = row_O < tokens * HEADS
    dout_OD = load_rows(dout + (row_O % HEADS)[:, None] * dout_stride_H, dout_stride_T,
                        row_O // HEADS, valid_O, True, HEAD_DIM, BLOCK_D)  # fmt: skip
    out_OD = load_rows(out, HEAD_DIM, row_O, valid_O, True, HEAD_DIM, BLOCK_D)
    delta_O = tl.sum(dout_OD.to(tl.float32) * out_OD.to(tl.float32), 1)
    tl.store(delta + row_O, delta_O, mask=valid_O)


@triton.jit
def _query_gradient(q_YD, dout_YD, lse_Y, delta_Y, keys, values, slot_Y, first_column, score_scale,
                    MASKED: tl.constexpr, BLOCK_D: tl.constexpr, TILE_ROWS: tl.constexpr,
                    TILE_COLUMNS: tl.constexpr, COLUMN_TILES: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """dq / softmax_scale from the tiles a program keeps."""
    dq_YD = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    for tile in tl.static_range(COLUMN_TILES):
        s_YC = tl.dot(q_YD, tl.trans(keys[tile]), input_precision=PRECISION) * score_scale
        p_YC = tl.exp2(s_YC - lse_Y[:, None])
        if MASKED:
            slot_C = first_column + tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
            p_YC = tl.where(slot_C[None, :] <= slot_Y[:, None], p_YC, 0.0)
        dp_YC = tl.dot(dout_YD, tl.trans(values[tile]), input_precision=PRECISION)
        ds_YC = p_YC * (dp_YC - delta_Y[:, None])
        dq_YD = tl.dot(ds_YC.to(q_YD.dtype), keys[tile], dq_YD, input_precision=PRECISION)
    return dq_YD


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS)
def _token_query_gradient_kernel(
    q, k, v, dout, lse, delta, parts, entries, bounds, item_list, item_part, own_blocks,
    token_blocks, query_starts, kv_starts, kv_ends, first_head, kv_head, chunk, chunks,
    chunk_tokens, items, width, place_bits, q_stride_T, q_stride_H, k_stride_T, k_stride_G,
    v_stride_T, v_stride_G, dout_stride_T, dout_stride_H, softmax_scale, query_heads,
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

    score_scale = softmax_scale * _LOG2_E
    head_Y, place_Y = row_places(HEADS, TILE_ROWS)
    head_Y += first_head
    q += head_Y.to(tl.int64)[:, None] * q_stride_H
    dout += head_Y.to(tl.int64)[:, None] * dout_stride_H
    first_token = chunk.to(tl.int64) * chunk_tokens
    next_Y = entry_at(entries, place_Y, count)
    for tile in range(0, masked):
        entry_Y, valid_Y = next_Y, place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        token_Y = (entry_Y >> place_bits).to(tl.int64)
        q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        dout_YD = load_rows(dout, dout_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        row_Y = token_Y * query_heads + head_Y
        lse_Y = tl.load(lse + row_Y, mask=valid_Y, other=0.0) * _LOG2_E
        delta_Y = tl.load(delta + row_Y, mask=valid_Y, other=0.0)
        dq_YD = _query_gradient(
            q_YD, dout_YD, lse_Y, delta_Y, keys, values, token_Y - own_start, first_column,
            score_scale, True, BLOCK_D, TILE_ROWS, TILE_COLUMNS, COLUMN_TILES, PRECISION,
        )  # fmt: skip
        store_partial(parts, dq_YD, entry_Y, token_Y, valid_Y, head_Y - first_head, part,
                      first_token, width, place_bits, PARTS, HEADS, HEAD_DIM, BLOCK_D)  # fmt: skip
    for tile in range(masked, tl.cdiv(count, TOKENS)):
        entry_Y, valid_Y = next_Y, place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        token_Y = (entry_Y >> place_bits).to(tl.int64)
        q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        dout_YD = load_rows(dout, dout_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
        row_Y = token_Y * query_heads + head_Y
        lse_Y = tl.load(lse + row_Y, mask=valid_Y, other=0.0) * _LOG2_E
        delta_Y = tl.load(delta + row_Y, mask=valid_Y, other=0.0)
        dq_YD = _query_gradient(
            q_YD, dout_YD, lse_Y, delta_Y, keys, values, token_Y, first_column, score_scale, False,
            BLOCK_D, TILE_ROWS, TILE_COLUMNS, COLUMN_TILES, PRECISION,
        )  # fmt: skip
        store_partial(parts, dq_YD, entry_Y, token_Y, valid_Y, head_Y - first_head, part,
                      first_token, width, place_bits, PARTS, HEADS, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit(do_not_specialize=OUTPUT_NUMBERS)
def _sum_kernel(
    parts, dq, counts, chunk, chunk_tokens, tokens, query_heads, selecting_heads, selecting_head,
    first_head, width, softmax_scale,
    HEADS: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    place_O, valid_O, count_O, result_O = output_rows(
        counts, chunk, chunk_tokens, tokens, query_heads, selecting_heads, selecting_head,
        first_head, width, HEADS, PARTS, ROWS,
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


@triton.jit
def _key_step(q, dout, lse, delta, k_CD, v_CD, slot_C, dk_CD, dv_CD, q_stride_T, dout_stride_T,
              score_scale, token_Y, valid_Y, head_Y, own_start, query_heads,
              MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Add what one tile of gathered queries gives. Probabilities lie transposed."""
    q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    dout_YD = load_rows(dout, dout_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
    # Past the last reader q, dout and delta are 0, so that such rows add nothing.
    row_Y = token_Y * query_heads + head_Y
    lse_Y = tl.load(lse + row_Y, mask=valid_Y, other=0.0) * _LOG2_E
    delta_Y = tl.load(delta + row_Y, mask=valid_Y, other=0.0)
    s_CY = tl.dot(k_CD, tl.trans(q_YD), input_precision=PRECISION) * score_scale
    p_CY = tl.exp2(s_CY - lse_Y[None, :])
    if MASKED:
        p_CY = tl.where(slot_C[:, None] <= (token_Y - own_start)[None, :], p_CY, 0.0)
    dv_CD = tl.dot(p_CY.to(dout_YD.dtype), dout_YD, dv_CD, input_precision=PRECISION)
    dp_CY = tl.dot(v_CD, tl.trans(dout_YD), input_precision=PRECISION)
    ds_CY = p_CY * (dp_CY - delta_Y[None, :])
    dk_CD = tl.dot(ds_CY.to(q_YD.dtype), q_YD, dk_CD, input_precision=PRECISION)
    return dk_CD, dv_CD


@triton.jit(
    do_not_specialize=[
        "first_head", "kv_head", "query_heads", "kv_tokens", "entries_per_item", "place_bits"
    ]
)  # fmt: skip
def _token_key_gradient_kernel(
    q, k, v, dout, lse, delta, sums, parts, offsets, entries, item_list, item_part, item_parts,
    own_blocks, token_blocks, query_starts, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, first_head, kv_head, query_heads, kv_tokens,
    entries_per_item, place_bits,
    ACCUMULATE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    TOKENS: tl.constexpr = TILE_ROWS // HEADS
    item = tl.program_id(0) // COLUMN_TILES
    first_column = (tl.program_id(0) % COLUMN_TILES) * TILE_COLUMNS
    block = tl.load(item_list + item)
    if block < 0:
        return
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    if first_column >= length:
        return

    score_scale = softmax_scale * _LOG2_E
    begin = tl.load(offsets + block) + tl.load(item_part + item) * entries_per_item
    count = tl.minimum(tl.load(offsets + block + 1) - begin, entries_per_item)
    entries += begin
    masked, own_start = own_prefix(entries, count, own_blocks, token_blocks, query_starts, block,
                                   length, place_bits, TOKENS)  # fmt: skip
    slot_C = first_column + tl.arange(0, TILE_COLUMNS)
    token_C = start + slot_C
    valid_C = slot_C < length
    k_CD = load_rows(k + kv_head.to(tl.int64) * k_stride_G, k_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    v_CD = load_rows(v + kv_head.to(tl.int64) * v_stride_G, v_stride_T, token_C, valid_C, True,
                     HEAD_DIM, BLOCK_D)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)

    head_Y, place_Y = row_places(HEADS, TILE_ROWS)
    head_Y += first_head
    q += head_Y.to(tl.int64)[:, None] * q_stride_H
    dout += head_Y.to(tl.int64)[:, None] * dout_stride_H
    next_Y = entry_at(entries, place_Y, count)
    for tile in range(0, masked):
        token_Y, valid_Y = (next_Y >> place_bits).to(tl.int64), place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        dk_CD, dv_CD = _key_step(
            q, dout, lse, delta, k_CD, v_CD, slot_C, dk_CD, dv_CD, q_stride_T, dout_stride_T,
            score_scale, token_Y, valid_Y, head_Y, own_start, query_heads, True, HEAD_DIM, BLOCK_D,
            PRECISION,
        )  # fmt: skip
    for tile in range(masked, tl.cdiv(count, TOKENS)):
        token_Y, valid_Y = (next_Y >> place_bits).to(tl.int64), place_Y + tile * TOKENS < count
        next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
        dk_CD, dv_CD = _key_step(
            q, dout, lse, delta, k_CD, v_CD, slot_C, dk_CD, dv_CD, q_stride_T, dout_stride_T,
            score_scale, token_Y, valid_Y, head_Y, own_start, query_heads, False, HEAD_DIM,
            BLOCK_D, PRECISION,
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
        place_CD = token_C[:, None] * HEAD_DIM + dim_D[None, :]
        dv = sums + kv_tokens.to(tl.int64) * HEAD_DIM
        if ACCUMULATE:
            dk_CD += tl.load(sums + place_CD, mask=stored_CD, other=0.0)
            dv_CD += tl.load(dv + place_CD, mask=stored_CD, other=0.0)
        tl.store(sums + place_CD, dk_CD, mask=stored_CD)
        tl.store(dv + place_CD, dv_CD, mask=stored_CD)
