# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The router by Triton kernels: means over blocks in one launch, lists and mass in two.

A program takes a query block and some of its heads: all tokens of the block, or the block itself,
which may read the same blocks. It writes the scores of a few rows into memory of its own, behind a
barrier, and sorts a 64-bit key per column, the score's bits above the column's number; so it finds
the list and, where coverage is observed, the softmax mass in the order of the list, which it sums.
Every exchange of the sorting network is a sum over pairs, so keys stay in registers and cross lanes
by shuffles. A second kernel adds up the blocks of a document. Nothing is atomic.

Shape legend: E query heads of a selecting head, W columns of a product, J columns of a row from its
document's first block on, then its places; in kernels Y rows of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout

PROGRAMS = 528
"""Programs of the router, each of which takes one query block after the other: four for each of 132
multiprocessors."""
KEYS_OF_A_WARP = 256
"""Eight of a thread: few enough that none spills, and that the sort fits the instruction cache."""
FEWEST_COLUMNS = 16
_FEWEST_WARPS = 4
_SCORE_ROWS = 64
_SCORE_COLUMNS = 64
_SUMMED_BLOCKS = 32
_SUMMED_COLUMNS = 64
_POOLED_TOKENS = 32
_LARGEST_SCORE = tl.constexpr(torch.finfo(torch.float32).max)
_NO_KEY = tl.constexpr(-(1 << 63))
_SIGN_AND_BITS = tl.constexpr(0x7FFFFFFF)


def launch_shape(columns: int, places: int, *, observe: bool) -> dict[str, int]:
    """Constants that the kernel is compiled for; all are powers of two, so that they are few."""
    columns = max(FEWEST_COLUMNS, triton.next_power_of_2(columns))
    listed = max(FEWEST_COLUMNS, triton.next_power_of_2(places))
    warps = max(_FEWEST_WARPS, columns // KEYS_OF_A_WARP)
    return {
        "TILE_ROWS": min(_SCORE_ROWS, KEYS_OF_A_WARP * warps // columns),
        "COLUMNS": columns,
        "TAKEN": columns if observe else min(columns, listed),
        "num_warps": warps,
    }


def rank_rows(
    queries_QCED: Tensor,
    keys_NGD: Tensor,
    layouts: LayoutPair,
    indices_QCK: Tensor,
    *,
    by_token: bool,
    softmax_scale: float,
    observe: bool,
    first_blocks: int,
) -> Tensor | None:
    """Write the lists, and give the mass; see :func:`..streaming.rank_in_chunks`."""
    _, heads, group, head_dim = queries_QCED.shape
    query_layout, kv_layout = layouts.query_layout, layouts.kv_layout
    queries_QCED = queries_QCED if queries_QCED.stride(3) == 1 else queries_QCED.contiguous()
    keys_NGD, device = keys_NGD.contiguous(), keys_NGD.device
    columns, blocks = kv_layout.max_blocks, query_layout.blocks
    shape = launch_shape(columns, indices_QCK.shape[2], observe=observe)
    # Few heads of a program where blocks alone would not fill the device.
    parts = next(n for n in range(1, heads + 1) if not heads % n and n * blocks >= min(
        heads * blocks, 2 * PROGRAMS))  # fmt: skip
    programs = min(PROGRAMS, blocks * parts)
    rows = _SCORE_ROWS if by_token else FEWEST_COLUMNS
    scores = torch.empty(programs * rows * shape["COLUMNS"], dtype=torch.float32, device=device)
    mass_NXJ = mass_SK = None
    if observe:
        mass_NXJ, mass_SK = (
            torch.empty(size, dtype=torch.float64, device=device)
            for size in ((blocks, parts, shape["COLUMNS"]), (kv_layout.documents, columns))
        )
    with torch.cuda.device_of(keys_NGD):
        _rank_kernel[(programs,)](
            *(queries_QCED, keys_NGD, indices_QCK, scores, mass_NXJ),
            *(query_layout.start_N, query_layout.length_N, layouts.own_block_N),
            *(kv_layout.document_first_N, *queries_QCED.stride()[:3]),
            *(blocks * parts, parts, programs, indices_QCK.shape[2], softmax_scale),
            BY_TOKEN=by_token,
            HEADS=heads,
            KV_HEADS=keys_NGD.shape[1],
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            OBSERVE=observe,
            FIRST_BLOCKS=min(first_blocks, columns - 1),
            HALF_PRODUCTS=_products_of_halves(queries_QCED, keys_NGD),
            SCORE_ROWS=rows,
            SCORE_COLUMNS=min(_SCORE_COLUMNS, shape["COLUMNS"]),
            num_stages=1,
            enable_fp_fusion=True,
            **shape | {"TILE_ROWS": min(rows, shape["TILE_ROWS"])},
        )
        if mass_SK is not None:
            _mass_kernel[kv_layout.documents, triton.cdiv(columns, _SUMMED_COLUMNS)](
                *(mass_NXJ, mass_SK, query_layout.length_N, layouts.own_block_N),
                *(kv_layout.document_N, kv_layout.first_block_S, kv_layout.blocks_S),
                *(blocks, parts, columns),
                BY_TOKEN=by_token,
                WITHIN=query_layout is kv_layout,
                COLUMNS=shape["COLUMNS"],
                SUMMED_BLOCKS=_SUMMED_BLOCKS,
                SUMMED_COLUMNS=_SUMMED_COLUMNS,
            )
    return mass_SK


def _products_of_halves(queries_QCED: Tensor, keys_NGD: Tensor) -> bool:
    """Whether queries ask as they are, in a half type: a product of two is exact in float32."""
    # Triton's interpreter takes no product of bfloat16.
    dtypes = {torch.float16} if triton.knobs.runtime.interpret else {torch.float16, torch.bfloat16}
    return queries_QCED.shape[2] == 1 and queries_QCED.dtype == keys_NGD.dtype in dtypes


@triton.jit(do_not_specialize=["units", "parts", "programs", "places"])
def _rank_kernel(
    queries, keys, lists, scores, mass, starts, lengths, own_blocks, document_firsts,
    q_stride_Q, q_stride_C, q_stride_E, units, parts, programs, places, softmax_scale,
    BY_TOKEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OBSERVE: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr, HALF_PRODUCTS: tl.constexpr,
    SCORE_ROWS: tl.constexpr, SCORE_COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Rank the rows of one query block after the other, and sum their mass by place."""
    scores += tl.program_id(0).to(tl.int64) * (SCORE_ROWS * COLUMNS)
    row_Y, column_W = tl.arange(0, SCORE_ROWS), tl.arange(0, SCORE_COLUMNS)
    column_J = tl.arange(0, COLUMNS)
    heads = HEADS // parts
    for unit in range(tl.program_id(0), units, programs):
        block, part = unit // parts, unit % parts
        own = tl.load(own_blocks + block)
        first = tl.load(document_firsts + own)
        last = (own - first).to(tl.int32)
        if BY_TOKEN:
            start, rows = tl.load(starts + block), tl.load(lengths + block).to(tl.int32)
        else:
            start, rows = block.to(tl.int64), 1
        mass_J = tl.zeros([COLUMNS], tl.float64)
        for head in range(part * heads, part * heads + heads):
            for row in range(0, rows, SCORE_ROWS):
                query_Y = start + row + row_Y
                q_YD = _mean_query(queries + head * q_stride_C, query_Y, row + row_Y < rows,
                                   q_stride_Q, q_stride_E, GROUP, HEAD_DIM, BLOCK_D)  # fmt: skip
                for column in range(0, last + 1, SCORE_COLUMNS):
                    key_W = first + column + column_W
                    dim_D = tl.arange(0, BLOCK_D)
                    k_WD = tl.load(
                        keys + (key_W * KV_HEADS + head // (HEADS // KV_HEADS))[:, None] * HEAD_DIM
                        + dim_D[None, :],
                        mask=(column + column_W <= last)[:, None] & (dim_D < HEAD_DIM)[None, :],
                        other=0.0,
                    )  # fmt: skip
                    if HALF_PRODUCTS:
                        s_YW = tl.dot(q_YD, tl.trans(k_WD), input_precision="ieee")
                    else:
                        s_YW = tl.dot(q_YD.to(tl.float32), tl.trans(k_WD.to(tl.float32)),
                                      input_precision="ieee")  # fmt: skip
                    tl.store(scores + row_Y[:, None] * COLUMNS + (column + column_W)[None, :],
                             s_YW)  # fmt: skip
                tl.debug_barrier()
                for tile in range(0, tl.minimum(SCORE_ROWS, rows - row), TILE_ROWS):
                    place_Y = tile + tl.arange(0, TILE_ROWS)
                    inside_Y1 = (row + place_Y < rows)[:, None]
                    score_YJ = tl.load(
                        scores + place_Y[:, None] * COLUMNS + column_J[None, :],
                        mask=inside_Y1 & (column_J <= last)[None, :], other=float("-inf"),
                    )  # fmt: skip
                    query_Y1 = (start + row + place_Y)[:, None]
                    best_YK = _list_rows(lists + (query_Y1 * HEADS + head) * places, score_YJ,
                                         inside_Y1, first, last, places, TILE_ROWS, COLUMNS,
                                         TAKEN, FIRST_BLOCKS)  # fmt: skip
                    if OBSERVE:
                        mass_YK = _mass(score_YJ, best_YK, last, softmax_scale, COLUMNS,
                                        FIRST_BLOCKS)  # fmt: skip
                        mass_J += tl.sum(tl.where(inside_Y1, mass_YK, 0.0).to(tl.float64), 0)
                tl.debug_barrier()
        if OBSERVE:
            tl.store(mass + (block.to(tl.int64) * parts + part) * COLUMNS + column_J, mass_J)


@triton.jit
def _mean_query(queries, query_Y, valid_Y, q_stride_Q, q_stride_E, GROUP: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Queries as they are where a head selects for itself; else float32 means over heads."""
    dim_D = tl.arange(0, BLOCK_D)
    inside_YD = valid_Y[:, None] & (dim_D < HEAD_DIM)[None, :]
    address_YD = queries + query_Y[:, None] * q_stride_Q + dim_D[None, :]
    q_YD = tl.load(address_YD, mask=inside_YD, other=0.0)
    if GROUP > 1:
        q_YD = q_YD.to(tl.float32)
        for other in tl.static_range(1, GROUP):
            q_YD += tl.load(address_YD + other * q_stride_E, mask=inside_YD, other=0.0).to(
                tl.float32
            )
        q_YD = tl.div_rn(q_YD, tl.full(q_YD.shape, GROUP, tl.float32))
    return q_YD


@triton.jit
def _list_rows(list_Y1, score_YJ, inside_Y1, first, last, places, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, TAKEN: tl.constexpr,
               FIRST_BLOCKS: tl.constexpr):  # fmt: skip
    """Write the lists of some rows, and give the keys in their order."""
    column_J, place_K = tl.arange(0, COLUMNS), tl.arange(0, TAKEN)
    visible_YJ = (column_J <= last)[None, :]
    own_YJ, first_YJ = (column_J == last)[None, :], (column_J < FIRST_BLOCKS)[None, :]
    key_YJ = _ordered(score_YJ, own_YJ, first_YJ).to(tl.int64) << 32
    key_YJ = tl.where(visible_YJ, key_YJ | (COLUMNS - 1 - column_J)[None, :], _NO_KEY)
    best_YK = _greatest(key_YJ, ROWS, COLUMNS, TAKEN)
    block_YK = first + (COLUMNS - 1 - (best_YK & (COLUMNS - 1)))
    tl.store(
        list_Y1 + place_K[None, :],
        tl.where((place_K <= last)[None, :], block_YK, -1).to(list_Y1.dtype.element_ty),
        mask=inside_Y1 & (place_K < places)[None, :],
    )
    for place in range(TAKEN, places, TAKEN):
        beyond_1K = (place + place_K)[None, :]
        absent_YK = tl.full([ROWS, TAKEN], -1, list_Y1.dtype.element_ty)
        tl.store(list_Y1 + beyond_1K, absent_YK, mask=inside_Y1 & (beyond_1K < places))
    return best_YK


@triton.jit
def _mass(score_YJ, best_YJ, last, softmax_scale, COLUMNS: tl.constexpr,
          FIRST_BLOCKS: tl.constexpr):  # fmt: skip
    """Softmax mass in the order of the keys; 0 past the visible columns."""
    column_J = tl.arange(0, COLUMNS)
    visible_YJ = (column_J <= last)[None, :]
    scaled_YJ = tl.where(visible_YJ, score_YJ * softmax_scale, float("-inf"))
    peak_Y1 = tl.max(scaled_YJ, 1)[:, None]
    total_Y1 = tl.sum(tl.exp(scaled_YJ - peak_Y1), 1)[:, None]
    own_score_Y1 = tl.sum(tl.where((column_J == last)[None, :], score_YJ, 0.0), 1)[:, None]
    bits_YJ = _flipped_if_negative((best_YJ >> 32).to(tl.int32))
    ranked_YJ = bits_YJ.to(tl.float32, bitcast=True)
    ranked_YJ = tl.where((column_J == 0)[None, :], own_score_Y1, ranked_YJ)
    for block in tl.static_range(FIRST_BLOCKS):
        score_Y1 = tl.sum(tl.where((column_J == block)[None, :], score_YJ, 0.0), 1)[:, None]
        is_place_J = (column_J == block + 1) & (block < last)
        ranked_YJ = tl.where(is_place_J[None, :], score_Y1, ranked_YJ)
    return tl.where(visible_YJ, tl.exp(ranked_YJ * softmax_scale - peak_Y1) / total_Y1, 0.0)


@triton.jit(do_not_specialize=["blocks", "parts", "columns"])
def _mass_kernel(
    mass, sums, lengths, own_blocks, documents, first_blocks, document_blocks, blocks, parts,
    columns, BY_TOKEN: tl.constexpr, WITHIN: tl.constexpr, COLUMNS: tl.constexpr,
    SUMMED_BLOCKS: tl.constexpr, SUMMED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the mass of a document's query blocks, which count once per token."""
    document = tl.program_id(0)
    column_J = tl.program_id(1) * SUMMED_COLUMNS + tl.arange(0, SUMMED_COLUMNS)
    sum_J = tl.zeros([SUMMED_COLUMNS], tl.float64)
    own_sum = tl.zeros([], tl.float64)
    if WITHIN:
        begin = tl.load(first_blocks + document)
        end = begin + tl.load(document_blocks + document)
    else:
        begin, end = tl.zeros([], tl.int64), blocks.to(tl.int64)
    for first in range(begin, end, SUMMED_BLOCKS):
        block_N = first + tl.arange(0, SUMMED_BLOCKS)
        own_N = tl.load(own_blocks + block_N, mask=block_N < end, other=-1)
        inside_N = tl.load(documents + own_N, mask=own_N >= 0, other=-1) == document
        weight_N = tl.full([SUMMED_BLOCKS], 1.0, tl.float64)
        if not BY_TOKEN:
            # Triton 3.6 compiles no mask here that hangs on another load; mass is 0 elsewhere.
            weight_N = tl.load(lengths + block_N, mask=block_N < end, other=0).to(tl.float64)
        for part in range(0, parts):
            mass_N = mass + (block_N * parts + part) * COLUMNS
            mass_NJ = tl.load(mass_N[:, None] + column_J[None, :],
                              mask=inside_N[:, None] & (column_J < COLUMNS)[None, :],
                              other=0.0)  # fmt: skip
            sum_J += tl.sum(mass_NJ * weight_N[:, None], 0)
            own_sum += tl.sum(tl.load(mass_N, mask=inside_N, other=0.0), 0)
    # One bad number makes a row NaN in every place that it sees, hence in the first.
    sum_J = tl.where(own_sum != own_sum, float("nan"), sum_J)
    tl.store(sums + document.to(tl.int64) * columns + column_J, sum_J, mask=column_J < columns)


@triton.jit
def _ordered(score_YJ, own_YJ, first_YJ):
    """Integers in the order of scores: NaN below all numbers, above them the first columns, above
    those the own one."""
    kept_YJ = tl.minimum(tl.maximum(score_YJ, -_LARGEST_SCORE), _LARGEST_SCORE)
    kept_YJ = tl.where(score_YJ != score_YJ, float("-inf"), kept_YJ)
    kept_YJ = tl.where(first_YJ, float("inf"), kept_YJ)
    # -0.0 equals 0.0, and so must its bits.
    kept_YJ = tl.where(kept_YJ == 0.0, 0.0, kept_YJ)
    ordered_YJ = _flipped_if_negative(kept_YJ.to(tl.int32, bitcast=True))
    return tl.where(own_YJ, _SIGN_AND_BITS, ordered_YJ)


@triton.jit
def _flipped_if_negative(bits):
    """From a float's bits to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & _SIGN_AND_BITS)


@triton.jit
def _greatest(x_YJ, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAKEN: tl.constexpr):
    """[Y, TAKEN]: the greatest of every row, falling.

    Batcher's bitonic sort (Knuth, The Art of Computer Programming, section 5.3.4) of runs of
    ``TAKEN``, which fall and rise in turn; then the pairwise greatest of two runs, which are the
    greatest of both, until one run is left.
    """
    BITS: tl.constexpr = TAKEN.bit_length() - 1
    HALVINGS: tl.constexpr = COLUMNS.bit_length() - TAKEN.bit_length()
    for bits in tl.static_range(1, BITS + 1):
        x_YJ = _merged(x_YJ, ROWS, COLUMNS, bits)
    for halving in tl.static_range(HALVINGS):
        x_YJ = _greater_of_runs(x_YJ, ROWS, COLUMNS >> (halving + 1), TAKEN)
        x_YJ = _merged(x_YJ, ROWS, COLUMNS >> (halving + 1), BITS)
    return x_YJ


@triton.jit
def _greater_of_runs(x_YJ, ROWS: tl.constexpr, LEFT: tl.constexpr, TAKEN: tl.constexpr):
    """[Y, LEFT]: place by place the greater of two neighbouring runs."""
    runs = tl.reshape(x_YJ, [ROWS, LEFT // TAKEN, 2, TAKEN])
    return tl.reshape(tl.max(runs, 2), [ROWS, LEFT])


@triton.jit
def _merged(x_YJ, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Bitonic runs of 2^BITS, sorted: every other one rises."""
    falls_J = ((tl.arange(0, COLUMNS) >> BITS) & 1) == 0
    for bit in tl.static_range(BITS):
        x_YJ = _exchanged(x_YJ, falls_J, ROWS, COLUMNS, 1 << (BITS - 1 - bit))
    return x_YJ


@triton.jit
def _exchanged(
    x_YJ, falls_J, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Pairs at a distance of ``STRIDE`` put in order."""
    pairs = tl.reshape(x_YJ, [ROWS, COLUMNS // (2 * STRIDE), 2, STRIDE])
    # The partner of each. Sums that overflow wrap, and the difference wraps back.
    other_YJ = tl.reshape(tl.sum(pairs, 2, keep_dims=True) - pairs, [ROWS, COLUMNS])
    is_first_J = (tl.arange(0, COLUMNS) & STRIDE) == 0
    less_YJ, more_YJ = tl.minimum(x_YJ, other_YJ), tl.maximum(x_YJ, other_YJ)
    return tl.where((is_first_J == falls_J)[None, :], more_YJ, less_YJ)


def pooled_means(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """See :func:`..summaries.block_means`, whose means these are to rounding."""
    _, heads, head_dim = x_THD.shape
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    mean_NHD = x_THD.new_empty(layout.blocks, heads, head_dim, dtype=wide)
    with torch.cuda.device_of(x_THD):
        _mean_kernel[layout.blocks, heads](
            *(x_THD, mean_NHD, layout.start_N, layout.length_N, *x_THD.stride()[:2]),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            TOKENS=_POOLED_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return mean_NHD


@triton.jit
def _mean_kernel(
    x_THD, mean_NHD, start_N, length_N, x_stride_T, x_stride_H,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Mean over the tokens of one block, of one head, in the dtype of the means."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, length = tl.load(start_N + block), tl.load(length_N + block).to(tl.int32)
    place_D = tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty)
    for token in range(0, length, TOKENS):
        place_T = token + tl.arange(0, TOKENS)
        x_TD = tl.load(
            x_THD + (begin + place_T)[:, None] * x_stride_T + head * x_stride_H + place_D[None, :],
            mask=(place_T < length)[:, None] & (place_D < HEAD_DIM)[None, :],
            other=0.0,
        )
        sum_D += tl.sum(x_TD.to(mean_NHD.dtype.element_ty), 0)
    tokens_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty) + length
    # Torch's division rounds to nearest; of float32, Triton's own does not.
    if mean_NHD.dtype.element_ty == tl.float32:
        mean_D = tl.div_rn(sum_D, tokens_D)
    else:
        mean_D = sum_D / tokens_D
    row_D = mean_NHD + (block * HEADS + head) * HEAD_DIM + place_D
    tl.store(row_D, mean_D, mask=place_D < HEAD_DIM)
