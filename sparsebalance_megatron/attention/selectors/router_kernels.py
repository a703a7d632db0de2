# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The router in two Triton kernels: means of blocks; and scores, best blocks and mass in one.

A program of the second ranks the rows of one query block (its tokens, or the one row that speaks
for them) for one head. It walks over the blocks that they may read, keeps the best ones in a sorted
list of 64-bit keys, each a score above a block number, and merges every tile of scores into it.
Scores never reach memory. Nothing is atomic, and neither budgets nor lengths compile anything: the
list's length is the next power of two.

No selector calls them yet: they agree with :mod:`.streaming` in Triton's interpreter and compile
for sm_90a, but spill registers there (216 bytes a thread with lists of 32, 3,040 with 512), and
were never timed.

Shape legend: H query heads or KV heads, D head dim, N blocks of a row, K places of a list, Q rows
that select, C heads that select, E query heads of a selecting head; in kernels Y rows of a tile,
W columns (blocks) of a tile, J places of the sorted list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.row_pair import RowPair
from sparsebalance_megatron.attention.selectors.document_mass import DocumentMass

ROWS = 16
COLUMNS = 64
LONGEST_LIST = 512
"""Places that fit the registers of a program."""
_MASS_BLOCKS = 512
_LEAST_PLACES = 16
_POOLED_TOKENS = 32
_LARGEST_SCORE = tl.constexpr(torch.finfo(torch.float32).max)
_NO_KEY = tl.constexpr(-(1 << 63))
_COLUMN_MASK = tl.constexpr((1 << 32) - 1)
_SIGN_AND_BITS = tl.constexpr(0x7FFFFFFF)


def pooled_means(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """float32 [N, H, D]: means over the tokens of every block."""
    _, heads, head_dim = x_THD.shape
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    mean_NHD = torch.empty(layout.blocks, heads, head_dim, dtype=torch.float32, device=x_THD.device)
    with torch.cuda.device_of(x_THD):
        _mean_kernel[layout.blocks, heads](
            x_THD,
            mean_NHD,
            layout.start_N,
            layout.length_N,
            x_THD.stride(0),
            x_THD.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            TOKENS=_POOLED_TOKENS,
            num_warps=4,
        )
    return mean_NHD


def list_places(places: int, max_blocks: int, *, observe: bool) -> int:
    """J: places of the sorted list. Mass is asked for at every place."""
    return max(_LEAST_PLACES, triton.next_power_of_2(max_blocks if observe else places))


def rank_in_kernels(
    askers_QCED: Tensor,
    keys_NGD: Tensor,
    rows: RowPair,
    *,
    by_token: bool,
    softmax_scale: float,
    places: int,
    observe: bool,
) -> tuple[Tensor, Tensor | None]:
    """indices_QCK and mass_SK; see :func:`..streaming.rank_in_chunks`."""
    query_layout, kv_layout = rows.query_layout, rows.kv_layout
    count, heads, group, head_dim = askers_QCED.shape
    if askers_QCED.stride(-1) != 1:
        askers_QCED = askers_QCED.contiguous()
    device, blocks = keys_NGD.device, query_layout.blocks
    width = list_places(places, kv_layout.max_blocks, observe=observe)
    indices_QCK = torch.empty(count, heads, places, dtype=torch.int32, device=device)
    mass_NCJ = torch.empty(
        *((blocks, heads, width) if observe else (1, 1, 1)), dtype=torch.float64, device=device
    )
    with torch.cuda.device_of(keys_NGD):
        _rank_kernel[blocks, heads](
            askers_QCED,
            keys_NGD.contiguous(),
            indices_QCK,
            mass_NCJ,
            query_layout.start_N if by_token else query_layout.number_N,
            query_layout.length_N,
            rows.own_block_N,
            kv_layout.first_block_S[kv_layout.document_N[rows.own_block_N]],
            *askers_QCED.stride()[:3],
            softmax_scale,
            places,
            HEADS=heads,
            KV_HEADS=keys_NGD.shape[1],
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            TILE_ROWS=ROWS,
            TILE_COLUMNS=min(COLUMNS, width),
            PLACES=width,
            BY_TOKEN=by_token,
            OBSERVE=observe,
            num_warps=4,
        )
    return indices_QCK, _of_documents(mass_NCJ, rows, by_token=by_token) if observe else None


def _of_documents(mass_NCJ: Tensor, rows: RowPair, *, by_token: bool) -> Tensor:
    """mass_SK from that of query blocks and heads, some blocks at a time."""
    mass = DocumentMass(rows, by_token=False, summed=by_token)
    document_N = rows.kv_layout.document_on_host[list(rows.own_blocks)]
    for first in range(0, len(document_N), _MASS_BLOCKS):
        some = slice(first, first + _MASS_BLOCKS)
        documents = slice(int(document_N[some].min()), int(document_N[some].max()) + 1)
        mass_NJ = mass_NCJ[some].sum(1)
        broken_N = ~mass_NJ.isfinite().all(1)
        mass.add(some, documents, mass_NJ.masked_fill(broken_N[:, None], 0.0).t(), broken_N)
    return mass.of_documents()


@triton.jit
def _mean_kernel(
    x_THD, mean_NHD, start_N, length_N, x_stride_T, x_stride_H,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Mean over the tokens of one block, of one head."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, length = tl.load(start_N + block), tl.load(length_N + block).to(tl.int32)
    place_D = tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for token in range(0, length, TOKENS):
        place_T = token + tl.arange(0, TOKENS)
        x_TD = tl.load(
            x_THD + (begin + place_T)[:, None] * x_stride_T + head * x_stride_H + place_D[None, :],
            mask=(place_T < length)[:, None] & (place_D < HEAD_DIM)[None, :],
            other=0.0,
        )
        sum_D += tl.sum(x_TD.to(tl.float32), 0)
    tl.store(
        mean_NHD + (block * HEADS + head) * HEAD_DIM + place_D,
        sum_D / length.to(tl.float32),
        mask=place_D < HEAD_DIM,
    )


@triton.jit
def _rank_kernel(
    askers_QCED, keys_NGD, indices_QCK, mass_NCJ, begin_N, length_N, own_N, first_N,
    asker_stride_Q, asker_stride_C, asker_stride_E, softmax_scale, places,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PLACES: tl.constexpr, BY_TOKEN: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    """Lists of the rows of one query block, for one head, and their mass by place."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(begin_N + block)
    count = tl.load(length_N + block).to(tl.int32) if BY_TOKEN else 1
    own, first = tl.load(own_N + block).to(tl.int32), tl.load(first_N + block).to(tl.int32)
    place_J = tl.arange(0, PLACES)
    mass_J = tl.zeros([PLACES], tl.float64)
    for row in range(0, count, TILE_ROWS):
        place_Y = row + tl.arange(0, TILE_ROWS)
        query_YD = _asking(
            askers_QCED + head * asker_stride_C, (begin + place_Y) * asker_stride_Q,
            place_Y < count, asker_stride_E, GROUP, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        list_YJ, own_score_Y, peak_Y, total_Y = _best_blocks(
            query_YD, keys_NGD + head // (HEADS // KV_HEADS) * HEAD_DIM, first, own,
            softmax_scale, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, TILE_ROWS, TILE_COLUMNS, PLACES,
        )  # fmt: skip
        block_YJ = (-list_YJ) & _COLUMN_MASK
        present_J = place_J <= own - first
        row_YJ = ((begin + place_Y) * HEADS + head)[:, None] * places
        tl.store(
            indices_QCK + row_YJ + place_J[None, :],
            tl.where(present_J[None, :], block_YJ, -1).to(tl.int32),
            mask=(place_Y < count)[:, None] & (place_J < places)[None, :],
        )
        if OBSERVE:
            ordered_YJ = ((list_YJ + block_YJ) >> 32).to(tl.int32)
            score_YJ = _flipped_if_negative(ordered_YJ).to(tl.float32, bitcast=True)
            score_YJ = tl.where((place_J == 0)[None, :], own_score_Y[:, None], score_YJ)
            share_YJ = tl.exp(score_YJ * softmax_scale - peak_Y[:, None]) / total_Y[:, None]
            counted_YJ = present_J[None, :] & (place_Y < count)[:, None]
            mass_J += tl.sum(tl.where(counted_YJ, share_YJ, 0.0).to(tl.float64), 0)
    if OBSERVE:
        tl.store(mass_NCJ + (block * HEADS + head) * PLACES + place_J, mass_J)


@triton.jit
def _asking(
    askers_ED, offset_Y, valid_Y, stride_E,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The mean of a selecting head's queries, in float32."""
    place_D = tl.arange(0, BLOCK_D)
    mask_YD = valid_Y[:, None] & (place_D < HEAD_DIM)[None, :]
    sum_YD = tl.zeros([valid_Y.shape[0], BLOCK_D], tl.float32)
    for query_head in range(GROUP):
        pointer_YD = askers_ED + offset_Y[:, None] + query_head * stride_E + place_D[None, :]
        sum_YD += tl.load(pointer_YD, mask=mask_YD, other=0.0).to(tl.float32)
    return sum_YD / GROUP


@triton.jit
def _best_blocks(
    query_YD, keys_ND, first, own, softmax_scale, stride_N,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Keys of the best blocks from ``first`` to ``own``, falling; the own block's score; and peak
    and sum of the softmax."""
    place_D = tl.arange(0, BLOCK_D)
    list_YJ = tl.full([TILE_ROWS, PLACES], _NO_KEY, tl.int64)
    own_score_Y = tl.zeros([TILE_ROWS], tl.float32)
    peak_Y = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total_Y = tl.zeros([TILE_ROWS], tl.float32)
    for column in range(first, own + 1, TILE_COLUMNS):
        block_W = column + tl.arange(0, TILE_COLUMNS)
        key_WD = tl.load(
            keys_ND + block_W.to(tl.int64)[:, None] * stride_N + place_D[None, :],
            mask=(block_W <= own)[:, None] & (place_D < HEAD_DIM)[None, :],
            other=0.0,
        )
        # TF32 would drop bits that decide between blocks.
        score_YW = tl.dot(query_YD, tl.trans(key_WD.to(tl.float32)), input_precision="ieee")
        visible_YW = (block_W <= own)[None, :] & (tl.zeros_like(score_YW) == 0.0)
        own_score_Y += tl.sum(tl.where((block_W == own)[None, :], score_YW, 0.0), 1)

        scaled_YW = tl.where(visible_YW, score_YW * softmax_scale, float("-inf"))
        higher_Y = tl.maximum(peak_Y, tl.max(scaled_YW, 1))
        base_Y = tl.where(higher_Y == float("-inf"), 0.0, higher_Y)
        total_Y = total_Y * tl.exp(peak_Y - base_Y) + tl.sum(tl.exp(scaled_YW - base_Y[:, None]), 1)
        peak_Y = higher_Y

        number_YW = _ordered(score_YW, (block_W == own)[None, :]).to(tl.int64) * (1 << 32)
        number_YW = tl.where(visible_YW, number_YW - block_W[None, :], _NO_KEY)
        rising_YW = _rising(number_YW, TILE_COLUMNS)
        # One falling after one rising sequence: their pairwise greatest, in merging order.
        list_YJ = tl.maximum(list_YJ, _at_the_end(rising_YW, TILE_ROWS, TILE_COLUMNS, PLACES))
        list_YJ = _merged(list_YJ, PLACES)
    return list_YJ, own_score_Y, peak_Y, total_Y


@triton.jit
def _ordered(score_YW, is_own_1W):
    """Integers in the order of scores: NaN below all numbers, the own block above."""
    kept_YW = tl.minimum(tl.maximum(score_YW, -_LARGEST_SCORE), _LARGEST_SCORE)
    kept_YW = tl.where(score_YW != score_YW, float("-inf"), kept_YW)
    kept_YW = tl.where(is_own_1W, float("inf"), kept_YW)
    # -0.0 equals 0.0, and so must its bits.
    kept_YW = tl.where(kept_YW == 0.0, 0.0, kept_YW)
    return _flipped_if_negative(kept_YW.to(tl.int32, bitcast=True))


@triton.jit
def _flipped_if_negative(bits):
    """From a float's bits to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & _SIGN_AND_BITS)


@triton.jit
def _rising(x_YW, PLACES: tl.constexpr):
    """Sorted along the second dimension, by Batcher's bitonic network."""
    BITS: tl.constexpr = PLACES.bit_length() - 1
    place_W = tl.arange(0, PLACES)
    for stage in tl.static_range(1, BITS + 1):
        rises_W = ((place_W >> stage) & 1) == 0
        for step in tl.static_range(stage):
            x_YW = _exchanged(x_YW, place_W, stage - 1 - step, rises_W)
    return x_YW


@triton.jit
def _merged(x_YJ, PLACES: tl.constexpr):
    """A bitonic sequence along the second dimension, sorted, the greatest first."""
    BITS: tl.constexpr = PLACES.bit_length() - 1
    place_J = tl.arange(0, PLACES)
    for step in tl.static_range(BITS):
        x_YJ = _exchanged(x_YJ, place_J, BITS - 1 - step, place_J < 0)
    return x_YJ


@triton.jit
def _exchanged(x_YJ, place_J, BIT: tl.constexpr, rises_J):
    """Pairs of places that differ in one bit put in order."""
    partner_J = place_J ^ (1 << BIT)
    index_YJ = tl.broadcast_to(partner_J[None, :], x_YJ.shape)
    other_YJ = tl.gather(x_YJ, index_YJ, 1)
    takes_less_J = (((place_J >> BIT) & 1) == 0) == rises_J
    less_YJ, more_YJ = tl.minimum(x_YJ, other_YJ), tl.maximum(x_YJ, other_YJ)
    return tl.where(takes_less_J[None, :], less_YJ, more_YJ)


@triton.jit
def _at_the_end(
    rising_YW, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PLACES: tl.constexpr
):
    """The last places of a list that holds no key elsewhere."""
    RUNS: tl.constexpr = PLACES // TILE_COLUMNS
    repeated_YRW = tl.broadcast_to(rising_YW[:, None, :], [TILE_ROWS, RUNS, TILE_COLUMNS])
    last_R = tl.arange(0, RUNS) == RUNS - 1
    return tl.reshape(tl.where(last_R[None, :, None], repeated_YRW, _NO_KEY), [TILE_ROWS, PLACES])
