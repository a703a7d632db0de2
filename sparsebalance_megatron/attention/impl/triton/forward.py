# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Forward kernel: one program per tile of query rows, over its block's list.

A query block's rows are ordered by head of the group, then token: a tile holds one head where a
block is at least a tile long, else several heads, which share the block's list anyway. Past blocks
are full, hence need no mask; the own block comes last, under the causal mask. Budgets are list
lengths read by the kernel, so a changed budget compiles nothing and stops nothing.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row, K width of lists; in kernels M query rows of a tile, C columns (keys) of a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.impl.triton.tiles import Tile, tiles_for
from sparsebalance_megatron.attention.selection import Selection

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
    kv_heads, layout = k_TGD.shape[1], selection.layout
    group = query_heads // kv_heads
    q_THD, k_TGD, v_TGD = (with_dense_rows(x) for x in (q_THD, k_TGD, v_TGD))
    out_THD = torch.empty(tokens, query_heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(tokens, query_heads, dtype=torch.float32, device=q_THD.device)
    tile = tiles_for(head_dim, q_THD.element_size()).forward
    rows = packed_rows(tile, group, layout.block_size)
    grid = (layout.blocks * kv_heads * (group * layout.block_size // rows),)
    with torch.cuda.device_of(q_THD):
        _forward_kernel[grid](
            q_THD,
            k_TGD,
            v_TGD,
            out_THD,
            lse_TH,
            selection.indices_RCK.contiguous(),
            selection.counts_RC.contiguous(),
            layout.start_N,
            layout.document_end_N,
            *(stride for x in (q_THD, k_TGD, v_TGD) for stride in x.stride()[:2]),
            softmax_scale * LOG2_E,
            layout.blocks,
            selection.indices_RCK.shape[2],
            KV_HEADS=kv_heads,
            GROUP=group,
            **tile_constants(q_THD, layout.block_size, rows, tile),
        )
    return out_THD, lse_TH


def with_dense_rows(x: Tensor) -> Tensor:
    """The same values with neighbouring head dims in neighbouring places.

    Rows keep a distance whose multiple within a tile takes 32 bits.
    """
    return x if x.stride(-1) == 1 and x.stride(0) < _LARGEST_ROW_STRIDE else x.contiguous()


def packed_rows(tile: Tile, group: int, block_size: int) -> int:
    """Rows of a tile that cuts the group * block_size rows of a query block evenly."""
    rows = tile.rows
    while (group * block_size) % rows:
        rows //= 2
    return rows


def tile_constants(x: Tensor, block_size: int, rows: int, tile: Tile) -> dict[str, object]:
    """Compile-time arguments that all kernels share; none depends on tokens or budgets."""
    return {
        "HEAD_DIM": x.shape[-1],
        "BLOCK_D": max(16, triton.next_power_of_2(x.shape[-1])),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": rows,
        "BLOCK_N": min(tile.columns, block_size),
        # Float32 means float32: its users are tests. Ignored for the half types.
        "PRECISION": "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


@triton.jit
def load_rows(
    pointer_MD, row_stride, row_M, valid_M, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_D] of a matrix; zeros where invalid and past the head dim.

    In a loop, let the pointer move and the rows stand still: then addresses cost one addition.
    """
    dim_D = tl.arange(0, BLOCK_D)
    address_MD = pointer_MD + row_M[:, None] * row_stride + dim_D[None, :]
    if MASKED:
        return tl.load(address_MD, mask=valid_M[:, None] & (dim_D < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(address_MD, mask=(dim_D < HEAD_DIM)[None, :], other=0.0)
    return tl.load(address_MD)


@triton.jit
def block_extent(starts, ends, block, BLOCK_SIZE: tl.constexpr):
    """A block's first token (int64) and its tokens (int32)."""
    start = tl.load(starts + block)
    length = tl.minimum(tl.load(ends + block) - start, BLOCK_SIZE).to(tl.int32)
    return start, length


@triton.jit
def block_list(indices, counts, block, kv_head, width, KV_HEADS: tl.constexpr):
    """Where a query block's list begins, its length, and 1 if the own block heads it, else 0."""
    row = block.to(tl.int64) * KV_HEADS + kv_head
    count = tl.load(counts + row)
    entries = indices + row * width
    first = tl.load(entries, mask=count > 0, other=-1)
    return entries, count, (first == block).to(tl.int32)


@triton.jit
def entry_at(entries, place, count):
    """An entry of a list; 0 past its end.

    Loops load the entry of their next turn. Were it loaded in the turn that needs it, tiles could
    not be copied ahead of it, and the copy would be waited for right after it was started.
    """
    return tl.load(entries + place, mask=place < count, other=0)


@triton.jit
def _online_softmax(q_MD, k_CD, v_CD, visible_MC, peak_M, total_M, out_MD, score_scale,
                    MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Take one tile of keys in. Scores are in units of log2."""
    s_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision=PRECISION)
    if MASKED:
        s_MC = tl.where(visible_MC, s_MC, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(s_MC, 1) * score_scale)
    p_MC = tl.exp2(s_MC * score_scale - new_peak_M[:, None])
    shrink_M = tl.exp2(peak_M - new_peak_M)
    total_M = total_M * shrink_M + tl.sum(p_MC, 1)
    out_MD = out_MD * shrink_M[:, None]
    out_MD = tl.dot(p_MC.to(v_CD.dtype), v_CD, out_MD, input_precision=PRECISION)
    return new_peak_M, total_M, out_MD


@triton.jit(do_not_specialize=["blocks", "width"])
def _forward_kernel(
    q, k, v, out, lse, indices, counts, starts, ends,
    q_stride_T, q_stride_H, k_stride_T, k_stride_G, v_stride_T, v_stride_G,
    score_scale, blocks, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = GROUP * BLOCK_SIZE // BLOCK_M
    COLUMN_TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    HEADS: tl.constexpr = KV_HEADS * GROUP
    # Neighbouring programs share a list, hence the cache; late blocks have the longest lists.
    program = tl.program_id(0)
    row_tile = program % ROW_TILES
    block = blocks - 1 - (program // ROW_TILES) % blocks
    kv_head = program // ROW_TILES // blocks
    start, length = block_extent(starts, ends, block, BLOCK_SIZE)
    first_slot = (row_tile * BLOCK_M) % BLOCK_SIZE
    if first_slot >= length:
        return

    row_M = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slot_M = row_M % BLOCK_SIZE
    head_M = kv_head * GROUP + row_M // BLOCK_SIZE
    token_M = start + slot_M
    valid_M = slot_M < length
    column_C = tl.arange(0, BLOCK_N)
    q_MD = load_rows(q + head_M.to(tl.int64)[:, None] * q_stride_H, q_stride_T, token_M, valid_M,
                     True, HEAD_DIM, BLOCK_D)  # fmt: skip
    k_head = k + kv_head.to(tl.int64) * k_stride_G
    v_head = v + kv_head.to(tl.int64) * v_stride_G
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    entries, count, own = block_list(indices, counts, block, kv_head, width, KV_HEADS)
    next_past = entry_at(entries, own, count)
    for step in range(own * COLUMN_TILES, count * COLUMN_TILES):
        past = next_past
        next_past = entry_at(entries, (step + 1) // COLUMN_TILES, count)
        # All blocks before the own one are full, so their starts need no look-up.
        first = start + (past - block) * BLOCK_SIZE + (step % COLUMN_TILES) * BLOCK_N
        k_CD = load_rows(k_head + first * k_stride_T, k_stride_T, column_C, column_C >= 0, False,
                         HEAD_DIM, BLOCK_D)  # fmt: skip
        v_CD = load_rows(v_head + first * v_stride_T, v_stride_T, column_C, column_C >= 0, False,
                         HEAD_DIM, BLOCK_D)  # fmt: skip
        peak_M, total_M, out_MD = _online_softmax(
            q_MD, k_CD, v_CD, True, peak_M, total_M, out_MD, score_scale, False, PRECISION
        )

    last_slot = tl.minimum(first_slot + BLOCK_M, BLOCK_SIZE)
    for first_column in range(0, own * tl.minimum(last_slot, length), BLOCK_N):
        slot_C = first_column + column_C
        token_C = start + slot_C
        k_CD = load_rows(k_head, k_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        v_CD = load_rows(v_head, v_stride_T, token_C, slot_C < length, True, HEAD_DIM, BLOCK_D)
        visible_MC = slot_C[None, :] <= slot_M[:, None]
        peak_M, total_M, out_MD = _online_softmax(
            q_MD, k_CD, v_CD, visible_MC, peak_M, total_M, out_MD, score_scale, True, PRECISION
        )

    # A row without keys: out 0, lse -inf.
    out_MD = out_MD / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    lse_M = tl.where(total_M > 0.0, (peak_M + tl.log2(total_M)) * _LN_2, float("-inf"))
    place_M = token_M * HEADS + head_M
    dim_D = tl.arange(0, BLOCK_D)
    tl.store(lse + place_M, lse_M, mask=valid_M)
    tl.store(out + place_M[:, None] * HEAD_DIM + dim_D[None, :], out_MD.to(out.dtype.element_ty),
             mask=valid_M[:, None] & (dim_D < HEAD_DIM)[None, :])  # fmt: skip
