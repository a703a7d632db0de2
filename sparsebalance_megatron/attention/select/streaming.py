# SPDX-License-Identifier: Apache-2.0
"""Scores of a few rows at a time, ranked in torch; or all rows, by Triton kernels.

Shape legend: Y rows of a chunk, I first blocks of a document.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.device import exact_product
from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.select.summaries import ranks_in_triton
from sparsebalance_megatron.config import Router

SCORES_AT_ONCE = 1 << 18
"""Scores computed at once: 1 MiB in float32, about a core's second-level cache."""
_CUDA_FACTOR = 2
_MOST_BLOCKS_IN_16_BITS = torch.iinfo(torch.int16).max
_UNREADABLE_FRACTION = 4
"""Part of a chunk's scores that may belong to blocks which their rows cannot read."""


def rank_in_chunks(
    queries_QCHD: Tensor,
    keys_NGD: Tensor,
    layouts: LayoutPair,
    *,
    by_token: bool,
    softmax_scale: float,
    places: int,
    observe: bool,
    first_blocks: int = 0,
    router: Router = "torch",
    score: Callable[[slice, slice], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """indices_QCK of ``places`` places and mass_SK of :class:`..ranking.Ranking`.

    Where the bits of scores are the same, both routers give the same lists, and mass to float32
    rounding. Lists are int16 where that numbers all blocks, else int32.

    Args:
        queries_QCHD: a row asks with the mean over H.
        keys_NGD: mean keys of the blocks of the keys' sequence; C is a multiple of G.
        first_blocks: of a document, which come after the own block whatever their scores.
        score: float32 [C, Y, W] of some rows and some blocks, before the softmax scale, in a tensor
            that may be overwritten; None is the product of queries and keys. It is ranked in torch.
    """
    heads, kv_layout, device = queries_QCHD.shape[1], layouts.kv_layout, keys_NGD.device
    own_Q = layouts.kv_block(by_token=by_token)
    # Lists are kept until the backward pass.
    dtype = torch.int16 if kv_layout.blocks <= _MOST_BLOCKS_IN_16_BITS else torch.int32
    indices_QCK = torch.empty(len(own_Q), heads, places, dtype=dtype, device=device)
    if score is None and ranks_in_triton(router, device, layouts, softmax_scale=softmax_scale):
        from sparsebalance_megatron.attention.select.router_kernels import rank_rows

        return indices_QCK, rank_rows(
            *(queries_QCHD, keys_NGD, layouts, indices_QCK),
            by_token=by_token,
            softmax_scale=softmax_scale,
            observe=observe,
            first_blocks=first_blocks,
        )
    elements = SCORES_AT_ONCE * (_CUDA_FACTOR if device.type == "cuda" else 1)
    first_Q = kv_layout.document_first_N[own_Q]
    mass_SK = None
    if observe:
        shape = kv_layout.documents, kv_layout.max_blocks
        mass_SK = torch.zeros(shape, dtype=torch.float64, device=device)
    # A query block speaks for all of its tokens.
    tokens_Q = torch.ones_like(own_Q) if by_token else layouts.query_layout.length_N
    keys_CND = keys_NGD.float().transpose(0, 1)
    keys_CND = keys_CND.repeat_interleave(heads // len(keys_CND), dim=0)
    score = score or (lambda rows, blocks: _product(queries_QCHD[rows], keys_CND[:, blocks]))
    for chunk in chunks(layouts, by_token=by_token, heads=heads, elements=elements):
        rows, first_column = chunk.rows, chunk.blocks.start
        scores_CYW = score(rows, chunk.blocks)
        visible = _Visible.of(
            *(scores_CYW, own_Q[rows] - first_column, first_Q[rows] - first_column),
            first_blocks=first_blocks,
        )
        if mass_SK is not None:
            mass_WY, broken_Y = _mass_by_place(scores_CYW * softmax_scale, visible)
            document_S1 = torch.arange(len(mass_SK), device=device)[chunk.documents, None]
            inside_SY = document_S1 == kv_layout.document_N[own_Q[rows]]
            # A product, since scattered sums are not reproducible on CUDA.
            sum_SW = (inside_SY * tokens_Q[rows].double()) @ mass_WY.t()
            sum_SW.masked_fill_((inside_SY & broken_Y).any(1, keepdim=True), torch.nan)
            columns = min(sum_SW.shape[1], mass_SK.shape[1])
            mass_SK[chunk.documents, :columns] += sum_SW[:, :columns]
        column_CYK = _best_columns_(scores_CYW, visible, places)
        absent_YK = torch.arange(places, device=device) > (own_Q[rows] - first_Q[rows])[:, None]
        column_CYK.add_(first_column).masked_fill_(absent_YK, -1)
        indices_QCK[rows] = column_CYK.transpose(0, 1).to(dtype)
    if mass_SK is not None:
        mass_SK.masked_fill_(mass_SK[:, :1].isnan(), torch.nan)
    return indices_QCK, mass_SK


def _product(askers_YCHD: Tensor, keys_CWD: Tensor) -> Tensor:
    """float32 [C, Y, W], before the softmax scale."""
    queries_YCHD = askers_YCHD.float()
    alone = queries_YCHD.shape[2] == 1
    queries_YCD = queries_YCHD[:, :, 0] if alone else queries_YCHD.mean(2)
    return exact_product(queries_YCD.transpose(0, 1), keys_CWD.transpose(1, 2))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive selecting rows, and the range of blocks and of documents that they may read."""

    rows: slice
    blocks: slice
    documents: slice


def chunks(pair: LayoutPair, *, by_token: bool, heads: int, elements: int) -> Iterator[Chunk]:
    """Cut the rows such that rows x heads x columns stay within ``elements``, or a row is alone.

    A row may read the blocks of its own document up to its own block. What a chunk's product
    computes beyond that is at most a quarter of ``elements``, besides what one block needs.
    """
    kv_layout = pair.kv_layout
    own_N = np.asarray(pair.own_blocks)
    document_N = kv_layout.grid.document_N[own_N]
    first_N = np.searchsorted(kv_layout.grid.document_N, document_N)
    blocks = pair.query_layout.blocks
    bounds = pair.query_layout.bounds_on_host if by_token else np.arange(blocks + 1)
    needed_N1 = np.append(0, np.cumsum((own_N + 1 - first_N) * np.diff(bounds)) * heads)
    begin = 0
    while begin < blocks:
        end, low, high = begin + 1, int(first_N[begin]), int(own_N[begin]) + 1
        while end < blocks:
            wider_low, wider_high = min(low, int(first_N[end])), max(high, int(own_N[end]) + 1)
            rows = int(bounds[end + 1] - bounds[begin])
            computed = rows * heads * (wider_high - wider_low)
            beyond = computed - int(needed_N1[end + 1] - needed_N1[begin])
            if computed > elements or beyond > elements // _UNREADABLE_FRACTION:
                break
            end, low, high = end + 1, wider_low, wider_high
        documents, last_row = document_N[begin:end], int(bounds[end])
        at_once = max(1, elements // (heads * (high - low)))
        for row in range(int(bounds[begin]), last_row, at_once):
            yield Chunk(
                rows=slice(row, min(row + at_once, last_row)),
                blocks=slice(low, high),
                documents=slice(int(documents.min()), int(documents.max()) + 1),
            )
        begin = end


_COLUMN_BITS = 32
_BELOW_ALL_SCORES = -0x7FFFFFFF
_ABOVE_ALL_SCORES = 0x7FFFFFFF
"""Above infinity, which stands for the score of a document's first blocks."""
_ABOVE_ALL_MASS = 2.0


class _Visible(NamedTuple):
    """Columns of a chunk that its rows do not see; the own one; the document's first ones."""

    hidden_YW: Tensor
    own_CY1: Tensor
    first_CYI: Tensor

    @classmethod
    def of(
        cls, scores_CYW: Tensor, own_Y: Tensor, first_Y: Tensor, *, first_blocks: int
    ) -> "_Visible":
        heads, _, columns = scores_CYW.shape
        own_Y1, first_Y1 = own_Y[:, None], first_Y[:, None]
        column_W = torch.arange(columns, device=own_Y.device)
        # A first block that a row does not see before its own one gives way to that.
        first_YI = (first_Y1 + column_W[: min(first_blocks, columns - 1)]).minimum(own_Y1)
        return cls(
            hidden_YW=(column_W < first_Y1) | (column_W > own_Y1),
            own_CY1=own_Y1.expand(heads, -1, 1),
            first_CYI=first_YI.expand(heads, -1, -1),
        )


def _best_columns_(scores_CYW: Tensor, visible: _Visible, places: int) -> Tensor:
    """int64 [C, Y, places]: the own column, the first ones, then the others by falling score, NaN
    last; anything in places past the visible columns. Overwrites ``scores_CYW``.

    One integer per column holds the score's bits, in an order that integers keep, above the
    column's number, so that no two are equal and any algorithm finds the same order.
    """
    hidden_YW, own_CY1, first_CYI = visible
    columns, greatest = scores_CYW.shape[2], torch.finfo(scores_CYW.dtype).max
    scores_CYW.nan_to_num_(nan=-torch.inf, posinf=greatest, neginf=-greatest)
    scores_CYW.scatter_(2, first_CYI, torch.inf)
    bits_CYW = scores_CYW.add_(0.0).view(torch.int32)  # -0.0 equals 0.0, and so must its bits
    ordered_CYW = (bits_CYW >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits_CYW)
    ordered_CYW.scatter_(2, own_CY1, _ABOVE_ALL_SCORES)
    keys_CYW = ordered_CYW.masked_fill_(hidden_YW, _BELOW_ALL_SCORES).long().mul_(1 << _COLUMN_BITS)
    keys_CYW -= torch.arange(columns, device=keys_CYW.device)
    best_CYK = keys_CYW.topk(min(places, columns), dim=-1).values
    column_CYK = best_CYK.neg_().bitwise_and_((1 << _COLUMN_BITS) - 1)
    return pad(column_CYK, (0, places - column_CYK.shape[2]))


def _mass_by_place(scaled_CYW: Tensor, visible: _Visible) -> tuple[Tensor, Tensor]:
    """float64 [W, Y]: softmax mass, summed over heads, of the own column, of the first ones, of the
    others from the greatest on; and bool [Y]: rows without finite mass, whose mass is 0 here."""
    hidden_YW, own_CY1, first_CYI = visible
    mass_CYW = scaled_CYW.masked_fill_(hidden_YW, -torch.inf).softmax(-1)
    own_mass_CY1 = mass_CYW.gather(2, own_CY1)
    firsts = first_CYI.shape[2]
    first_mass_CYI = mass_CYW.gather(2, first_CYI).masked_fill_(first_CYI == own_CY1, 0.0)
    mass_CYW.scatter_(2, first_CYI, _ABOVE_ALL_MASS)
    mass_CYW.scatter_(2, own_CY1, torch.inf)
    rising_CYW = _sorted(mass_CYW)
    rising_CYW[..., -1:] = own_mass_CY1
    rising_CYW[..., -1 - firsts : -1] = first_mass_CYI.flip(-1)
    # One bad number makes a whole row NaN.
    broken_Y = own_mass_CY1.isnan().any(0)[:, 0]
    mass_YW = rising_CYW.sum(0, dtype=torch.float64).flip(-1)
    return mass_YW.masked_fill_(broken_Y[:, None], 0.0).t(), broken_Y


def _sorted(x: Tensor) -> Tensor:
    """Rows, rising; ``x`` may be overwritten."""
    if x.device.type != "cpu":
        return x.sort(-1).values
    x.numpy().sort(axis=-1)  # an eighth of the time of torch.sort
    return x
