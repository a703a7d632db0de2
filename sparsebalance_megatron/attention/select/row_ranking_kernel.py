# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Rows of scores ranked by a Triton kernel.

A program takes a few rows of one head. It sorts a 64-bit key per column, the score's bits above the
column's number, and writes the list; where coverage is observed it also writes the softmax mass in
the order of the list, over the scores. Every exchange of the sorting network is a sum over pairs,
so keys stay in registers and cross lanes by shuffles. Nothing is atomic.

Shape legend: K places of a list, C heads that select; in the kernel Y rows of a chunk or of a
program, W columns of a chunk, J columns of a row from its first on, then its places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair

KEYS_OF_A_WARP = 256
"""Eight of a thread: few enough that none spills, and that the sort fits the instruction cache."""
FEWEST_COLUMNS = 16
RUN_TIME_NUMBERS = ["first_column", "rows", "columns", "places", "mass_places"]
UNALIGNED = ["lists_YCK", "own_Y", "first_Y"]
"""Tensors that begin where a chunk does."""
_LARGEST_SCORE = tl.constexpr(torch.finfo(torch.float32).max)
_NO_KEY = tl.constexpr(-(1 << 63))
_SIGN_AND_BITS = tl.constexpr(0x7FFFFFFF)


def launch_shape(columns: int, places: int, *, observe: bool) -> dict[str, int]:
    """What the kernel is compiled for: rows of a program, columns of a row, places that are sorted
    and warps. All follow from powers of two, so lengths and budgets compile little."""
    columns = max(FEWEST_COLUMNS, triton.next_power_of_2(columns))
    listed = max(FEWEST_COLUMNS, triton.next_power_of_2(places))
    taken = columns if observe else min(columns, listed)
    return {
        "TILE_ROWS": max(1, KEYS_OF_A_WARP // columns),
        "COLUMNS": columns,
        "TAKEN": taken,
        "num_warps": max(1, columns // KEYS_OF_A_WARP),
    }


class KernelRowRanker:
    """What :class:`..row_ranking.RowRanker` is, in one launch per chunk."""

    def __init__(self, layouts: LayoutPair, *, softmax_scale: float, observe: bool) -> None:
        self._max_blocks = layouts.kv_layout.max_blocks
        self._softmax_scale = softmax_scale
        self._observe = observe

    def rank_(
        self,
        scores_CYW: Tensor,
        own_Y: Tensor,
        first_Y: Tensor,
        lists_YCK: Tensor,
        *,
        first_column: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Rank a chunk; see :meth:`..row_ranking.RowRanker.rank_`."""
        scores_CYW = scores_CYW.contiguous()
        heads, rows, columns = scores_CYW.shape
        mass_places = min(columns, self._max_blocks)
        shape = launch_shape(mass_places, lists_YCK.shape[2], observe=self._observe)
        with torch.cuda.device_of(scores_CYW):
            _rank_kernel[triton.cdiv(rows, shape["TILE_ROWS"]), heads](
                scores_CYW,
                lists_YCK,
                own_Y,
                first_Y,
                first_column,
                rows,
                columns,
                lists_YCK.shape[2],
                mass_places,
                self._softmax_scale,
                HEADS=heads,
                OBSERVE=self._observe,
                num_stages=1,
                enable_fp_fusion=True,
                **shape,
            )
        if not self._observe:
            return None
        mass_YK = scores_CYW[:, :, :mass_places].sum(0, dtype=torch.float64)
        # One bad number makes a whole row NaN.
        broken_Y = mass_YK[:, 0].isnan()
        return mass_YK.masked_fill_(broken_Y[:, None], 0.0).t(), broken_Y


@triton.jit(do_not_specialize=RUN_TIME_NUMBERS, do_not_specialize_on_alignment=UNALIGNED)
def _rank_kernel(
    scores_CYW, lists_YCK, own_Y, first_Y, first_column, rows, columns, places, mass_places,
    softmax_scale, HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TAKEN: tl.constexpr, OBSERVE: tl.constexpr,
):  # fmt: skip
    """Lists of the rows of one program, and their mass by place."""
    head, place_Y = tl.program_id(1), tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside_Y1 = (place_Y < rows)[:, None]
    begin_Y = tl.load(first_Y + place_Y, mask=place_Y < rows, other=0).to(tl.int32)
    last_Y = tl.load(own_Y + place_Y, mask=place_Y < rows, other=-1).to(tl.int32) - begin_Y
    begin_Y -= first_column
    column_J, place_K = tl.arange(0, COLUMNS), tl.arange(0, TAKEN)
    row_Y1 = scores_CYW + (head.to(tl.int64) * rows + place_Y)[:, None] * columns

    visible_YJ = column_J[None, :] <= last_Y[:, None]
    own_YJ = column_J[None, :] == last_Y[:, None]
    score_YJ = tl.load(
        row_Y1 + begin_Y[:, None] + column_J[None, :], mask=visible_YJ, other=float("-inf")
    )
    key_YJ = _ordered(score_YJ, own_YJ).to(tl.int64) << 32 | (COLUMNS - 1 - column_J)[None, :]
    key_YJ = tl.where(visible_YJ, key_YJ, _NO_KEY)
    best_YK = _greatest(key_YJ, TILE_ROWS, COLUMNS, TAKEN)

    present_YK = place_K[None, :] <= last_Y[:, None]
    column_YK = COLUMNS - 1 - (best_YK & (COLUMNS - 1)).to(tl.int32) + begin_Y[:, None]
    list_Y1 = lists_YCK + (place_Y.to(tl.int64) * HEADS + head)[:, None] * places
    tl.store(
        list_Y1 + place_K[None, :],
        tl.where(present_YK, column_YK + first_column, -1),
        mask=inside_Y1 & (place_K < places)[None, :],
    )
    for place in range(TAKEN, places, TAKEN):
        beyond_1K = (place + place_K)[None, :]
        absent_YK = tl.full([TILE_ROWS, TAKEN], -1, tl.int32)
        tl.store(list_Y1 + beyond_1K, absent_YK, mask=inside_Y1 & (beyond_1K < places))
    if OBSERVE:
        scaled_YJ = tl.where(visible_YJ, score_YJ * softmax_scale, float("-inf"))
        peak_Y1 = tl.max(scaled_YJ, 1)[:, None]
        total_Y1 = tl.sum(tl.exp(scaled_YJ - peak_Y1), 1)[:, None]
        own_score_Y1 = tl.sum(tl.where(own_YJ, score_YJ, 0.0), 1)[:, None]
        bits_YK = _flipped_if_negative((best_YK >> 32).to(tl.int32))
        score_YK = bits_YK.to(tl.float32, bitcast=True)
        score_YK = tl.where((place_K == 0)[None, :], own_score_Y1, score_YK)
        mass_YK = tl.exp(score_YK * softmax_scale - peak_Y1) / total_Y1
        tl.store(
            row_Y1 + place_K[None, :],
            tl.where(present_YK, mass_YK, 0.0),
            mask=inside_Y1 & (place_K < mass_places)[None, :],
        )


@triton.jit
def _ordered(score_YJ, own_YJ):
    """Integers in the order of scores: NaN below all numbers, the own column above."""
    kept_YJ = tl.minimum(tl.maximum(score_YJ, -_LARGEST_SCORE), _LARGEST_SCORE)
    kept_YJ = tl.where(score_YJ != score_YJ, float("-inf"), kept_YJ)
    kept_YJ = tl.where(own_YJ, float("inf"), kept_YJ)
    # -0.0 equals 0.0, and so must its bits.
    kept_YJ = tl.where(kept_YJ == 0.0, 0.0, kept_YJ)
    return _flipped_if_negative(kept_YJ.to(tl.int32, bitcast=True))


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
