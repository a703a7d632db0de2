# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The backward pass of lists by token, and its kernel for dk and dv.

dq goes as the forward pass does. dk and dv stay in registers while a program streams the tokens
that chose its block; long lists are cut into items, whose float32 parts are added in order. Units
of query heads that share a KV head add to the same sums one launch after the other, each launch for
as many KV heads as the memory for parts allows.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads (of a batch), D head dim, I
items, B tokens of a block; in kernels Y query rows of a tile (token by token, heads side by side),
C columns (keys) of a tile, O rows of output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    LOG2_E,
    add_parts,
    block_extent,
    entry_at,
    key_step,
    load_rows,
    row_strides,
    store_key_gradients,
    tile_constants,
    wanted_items,
    with_dense_rows,
)
from sparsebalance_megatron.attention.kernels.triton.index import inverse_lists
from sparsebalance_megatron.attention.kernels.triton.tiles import (
    Tile,
    capability_of,
    token_tiles_for,
)
from sparsebalance_megatron.attention.kernels.triton.token_query_kernels import add_query_gradient
from sparsebalance_megatron.attention.kernels.triton.token_work import (
    PARTIAL_BYTES,
    TokenWork,
    head_batches,
    own_prefix,
    row_places,
    unit_heads,
)

_DELTA_ROWS = 32
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q_THD, k_TGD, v_TGD and dout_THD."""


def backward_by_token(dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGD in the inputs' dtype."""
    q_THD, k_TGD, v_TGD, dout_THD = (
        with_dense_rows(x) for x in (saved.q_THD, saved.k_TGD, saved.v_TGD, dout_THD)
    )
    inputs = q_THD, k_TGD, v_TGD, dout_THD
    selection, (_, query_heads, head_dim) = saved.selection, q_THD.shape
    tokens, kv_heads, _ = k_TGD.shape
    tiles = token_tiles_for(head_dim, q_THD.element_size(), capability_of(q_THD.device))
    heads = unit_heads(
        selection, query_heads, min(tiles.query_gradient.rows, tiles.key_gradient.rows)
    )
    dq_THD, dk_TGD, dv_TGD = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TGD, k_TGD)
    )
    with torch.cuda.device_of(dout_THD):
        statistics = saved.lse_TH.contiguous(), _delta(dout_THD, saved.out_THD.contiguous())
        for batch in head_batches(selection, query_heads, kv_heads):
            work = TokenWork.of(q_THD, kv_heads, batch, tiles.query_gradient, heads, streamed=2)
            add_query_gradient(dq_THD, inputs, *statistics, work, saved.softmax_scale)
            if batch.begins:
                summed = batch.kv_heads.stop - batch.kv_heads.start
                sums_2TGD = torch.empty(
                    2, tokens, summed, head_dim, dtype=torch.float32, device=k_TGD.device
                )
            _add_key_gradients(
                sums_2TGD, inputs, statistics, work, tiles.key_gradient, saved.softmax_scale
            )
            if batch.ends:
                dk_TGD[:, batch.kv_heads], dv_TGD[:, batch.kv_heads] = sums_2TGD
    return dq_THD, dk_TGD, dv_TGD


def _add_key_gradients(
    sums_2TGD: Tensor,
    inputs: Inputs,
    statistics: tuple[Tensor, Tensor],
    work: TokenWork,
    tile: Tile,
    softmax_scale: float,
) -> None:
    """Add what a batch gives to dk and dv of its KV heads, or begin with it."""
    batch, selection = work.batch, work.batch.selection
    layout, (kv_heads, head_dim) = selection.kv_layout, sums_2TGD.shape[2:]
    constants = tile_constants(inputs[0], layout.block_size, tile.rows, tile)
    column_tiles = layout.block_size // constants["TILE_COLUMNS"]
    lists = inverse_lists(
        selection,
        wanted_items=wanted_items(column_tiles),
        entries=work.entries,
        groups=selection.counts_QC.shape[1],
    )
    part_bytes = 8 * lists.cut_items * layout.block_size * head_dim
    at_once = min(kv_heads, max(1, PARTIAL_BYTES // max(1, part_bytes)))
    parts_I2BD = torch.empty(
        *(at_once * lists.cut_items, 2, layout.block_size, head_dim),
        dtype=torch.float32,
        device=sums_2TGD.device,
    )
    # Units that add to the same KV head.
    adding = work.units // kv_heads
    for first in range(0, kv_heads, at_once):
        summed = min(at_once, kv_heads - first)
        for unit in range(adding):
            accumulate = unit > 0 or not batch.begins
            _token_key_kernel[lists.item_list_FI.shape[1] * column_tiles, summed](
                *inputs,
                *statistics,
                *sums_2TGD,
                parts_I2BD,
                work.entries.offsets_U,
                work.entries.queries_E,
                lists.item_list_FI,
                lists.item_part_FI,
                lists.item_parts_FI,
                selection.own_block_N,
                selection.query_layout.block_T,
                selection.query_layout.start_N,
                layout.start_N,
                layout.document_end_N,
                *row_strides(*inputs),
                softmax_scale,
                first * adding + unit,
                adding,
                first,
                batch.query_heads.start,
                work.group,
                inputs[0].shape[1],
                kv_heads,
                lists.item_list_FI.shape[1],
                lists.cut_items,
                layout.blocks,
                lists.entries_per_item,
                work.entries.place_bits,
                ACCUMULATE=accumulate,
                HEADS=work.heads,
                LIST_UNITS=work.list_units,
                **constants,
            )
            add_parts(
                lists,
                parts_I2BD,
                sums_2TGD[0],
                sums_2TGD[1],
                layout,
                first_group=(first * adding + unit) // work.list_units,
                group_step=adding // work.list_units,
                first_kv_head=first,
                groups=summed,
                accumulate=accumulate,
            )


def _delta(dout_THD: Tensor, out_THD: Tensor) -> Tensor:
    """delta_TH: the sum over D of dout * out, float32."""
    tokens, query_heads, head_dim = out_THD.shape
    delta_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=out_THD.device)
    _delta_kernel[(triton.cdiv(delta_TH.numel(), _DELTA_ROWS),)](
        dout_THD,
        out_THD,
        delta_TH,
        *row_strides(dout_THD),
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


@triton.jit(
    do_not_specialize=[
        "first_unit", "adding", "first_kv_head", "first_head", "group", "query_heads", "kv_heads",
        "items", "cut_items", "blocks", "entries_per_item", "place_bits",
    ]
)  # fmt: skip
def _token_key_kernel(
    q, k, v, dout, lse, delta, dk, dv, parts, offsets, entries, item_list, item_part, item_parts,
    own_blocks, token_blocks, query_starts, kv_starts, kv_ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    dout_stride_T, dout_stride_H, softmax_scale, first_unit, adding, first_kv_head, first_head,
    group, query_heads, kv_heads, items, cut_items, blocks, entries_per_item, place_bits,
    ACCUMULATE: tl.constexpr, HEADS: tl.constexpr, LIST_UNITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one unit of every KV head of the launch in: the first one's number, and how far on the
    next KV head's is."""
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // TILE_COLUMNS
    TOKENS: tl.constexpr = TILE_ROWS // HEADS
    unit = first_unit + tl.program_id(1) * adding
    list_head = (unit // LIST_UNITS).to(tl.int64)
    item = tl.program_id(0) // COLUMN_TILES
    first_column = (tl.program_id(0) % COLUMN_TILES) * TILE_COLUMNS
    place = list_head * items + item
    block = tl.load(item_list + place)
    if block < 0:
        return
    start, length = block_extent(kv_starts, kv_ends, block, BLOCK_SIZE)
    if first_column >= length:
        return

    score_scale = softmax_scale * LOG2_E
    offsets += list_head * blocks + block
    begin = tl.load(offsets) + tl.load(item_part + place) * entries_per_item
    count = tl.minimum(tl.load(offsets + 1) - begin, entries_per_item)
    entries += begin
    masked, own_start = own_prefix(entries, count, own_blocks, token_blocks, query_starts, block,
                                   length, place_bits, TOKENS)  # fmt: skip
    slot_C = first_column + tl.arange(0, TILE_COLUMNS)
    token_C = start + slot_C
    valid_C = slot_C < length
    first_head += unit * HEADS
    kv_head = (first_head // group).to(tl.int64)
    k_CD = load_rows(k + kv_head * k_stride_G, k_stride_T, token_C, valid_C, True, HEAD_DIM,
                     BLOCK_D)  # fmt: skip
    v_CD = load_rows(v + kv_head * v_stride_G, v_stride_T, token_C, valid_C, True, HEAD_DIM,
                     BLOCK_D)  # fmt: skip
    dk_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)
    dv_CD = tl.zeros([TILE_COLUMNS, BLOCK_D], tl.float32)

    head_Y, place_Y = row_places(HEADS, TILE_ROWS)
    head_Y += first_head
    q += head_Y.to(tl.int64)[:, None] * q_stride_H
    dout += head_Y.to(tl.int64)[:, None] * dout_stride_H
    next_Y = entry_at(entries, place_Y, count)
    for past in tl.static_range(2):
        # Tiles that may hold tokens of the block itself, then the others.
        for tile in range(masked if past else 0, tl.cdiv(count, TOKENS) if past else masked):
            token_Y, valid_Y = (next_Y >> place_bits).to(tl.int64), place_Y + tile * TOKENS < count
            next_Y = entry_at(entries, place_Y + (tile + 1) * TOKENS, count)
            q_YD = load_rows(q, q_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
            dout_YD = load_rows(dout, dout_stride_T, token_Y, valid_Y, True, HEAD_DIM, BLOCK_D)
            # Past the last reader q, dout and delta are 0.
            row_Y = token_Y * query_heads + head_Y
            lse_Y = tl.load(lse + row_Y, mask=valid_Y, other=0.0) * LOG2_E
            delta_Y = tl.load(delta + row_Y, mask=valid_Y, other=0.0)
            dk_CD, dv_CD = key_step(
                q_YD, dout_YD, lse_Y, delta_Y, k_CD, v_CD, slot_C, token_Y - own_start, dk_CD,
                dv_CD, score_scale, past == 0, PRECISION,
            )  # fmt: skip

    store_key_gradients(
        dk, dv, parts, dk_CD * softmax_scale, dv_CD, token_C, slot_C, valid_C,
        first_kv_head + tl.program_id(1), kv_heads, tl.program_id(1) * cut_items + item,
        tl.load(item_parts + place) > 1, ACCUMULATE, HEAD_DIM, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
