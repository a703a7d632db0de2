# SPDX-License-Identifier: Apache-2.0
"""Scores of a few rows at a time, ranked in torch; or all rows, by Triton kernels.

What is kept is the lists alone, and a sum per document.

Shape legend: S documents of the keys' sequence, Q rows that select, C heads that select, E query
heads of a selecting head, Y rows of a chunk, W columns of a chunk (blocks that its rows may read),
I first blocks of a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.precision import exact_product
from sparsebalance_megatron.attention.select.router_choice import ranks_in_triton
from sparsebalance_megatron.config import Router

SCORES_AT_ONCE = 1 << 18
"""Scores computed at once: 1 MiB in float32, about a core's second-level cache."""
_CUDA_FACTOR = 2
_MOST_BLOCKS_IN_16_BITS = torch.iinfo(torch.int16).max
_UNREADABLE_FRACTION = 4
"""Part of a chunk's scores that may belong to blocks which their rows cannot read."""


def rank_in_chunks(
    queries_QCED: Tensor,
    keys_NGD: Tensor,
    layouts: LayoutPair,
    *,
    by_token: bool,
    softmax_scale: float,
    places: int,
    observe: bool,
    first_blocks: int = 0,
    router: Router = "torch",
) -> tuple[Tensor, Tensor | None]:
    """indices_QCK of ``places`` places and mass_SK of :class:`..ranking.Ranking`.

    Where the bits of scores are the same, both routers give the same lists, and mass to float32
    rounding. Lists are int16 where that numbers all blocks, else int32.

    Args:
        queries_QCED: a row asks with the mean over E.
        keys_NGD: mean keys of the blocks of the keys' sequence; C is a multiple of G.
        by_token: whether rows are tokens, or blocks that speak for their tokens.
        first_blocks: of a document, which come after the own block whatever their scores.
        router: who ranks; see :func:`..router_choice.ranks_in_triton`.

    Raises:
        ValueError: ``router`` is "triton", and it does not serve.
    """
    heads, kv_layout, device = queries_QCED.shape[1], layouts.kv_layout, keys_NGD.device
    own_Q = layouts.kv_block(by_token=by_token)
    # Lists are kept until the backward pass.
    dtype = torch.int16 if kv_layout.blocks <= _MOST_BLOCKS_IN_16_BITS else torch.int32
    indices_QCK = torch.empty(len(own_Q), heads, places, dtype=dtype, device=device)
    if ranks_in_triton(router, device, layouts, softmax_scale=softmax_scale):
        from sparsebalance_megatron.attention.select.router_kernels import rank_rows

        return indices_QCK, rank_rows(
            *(queries_QCED, keys_NGD, layouts, indices_QCK),
            by_token=by_token,
            softmax_scale=softmax_scale,
            observe=observe,
            first_blocks=first_blocks,
        )
    ranker = RowRanker(softmax_scale=softmax_scale, observe=observe, first_blocks=first_blocks)
    elements = SCORES_AT_ONCE * (_CUDA_FACTOR if device.type == "cuda" else 1)
    first_Q = kv_layout.document_first_N[own_Q]
    mass = DocumentMass(layouts, by_token=by_token) if observe else None
    keys_CND = keys_NGD.float().transpose(0, 1)
    keys_CND = keys_CND.repeat_interleave(heads // len(keys_CND), dim=0)
    for chunk in chunks(layouts, by_token=by_token, heads=heads, elements=elements):
        lists_YCK = indices_QCK[chunk.rows]
        seen = ranker.rank_(
            _scores(queries_QCED[chunk.rows], keys_CND[:, chunk.blocks]),
            own_Q[chunk.rows],
            first_Q[chunk.rows],
            lists_YCK,
            first_column=chunk.blocks.start,
        )
        if mass is not None and seen is not None:
            mass.add(chunk.rows, chunk.documents, *seen)
    return indices_QCK, None if mass is None else mass.of_documents()


def _scores(askers_YCED: Tensor, keys_CWD: Tensor) -> Tensor:
    """float32 [C, Y, W], before the softmax scale."""
    queries_YCED = askers_YCED.float()
    alone = queries_YCED.shape[2] == 1
    queries_YCD = queries_YCED[:, :, 0] if alone else queries_YCED.mean(2)
    return exact_product(queries_YCD.transpose(0, 1), keys_CWD.transpose(1, 2))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive selecting rows and all that they may select from.

    ``rows``: tokens or blocks of the queries' sequence. ``blocks``: of the keys' sequence, from the
    first that any row may read to the last. ``documents``: of the keys' sequence, from the first to
    the last.
    """

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
    needed = np.cumsum((own_N + 1 - first_N) * np.diff(bounds)) * heads
    begin, low, high, done = 0, int(first_N[0]), int(own_N[0]) + 1, 0
    for block in range(1, blocks + 1):
        if block < blocks:
            wider_low = min(low, int(first_N[block]))
            wider_high = max(high, int(own_N[block]) + 1)
            rows = int(bounds[block + 1] - bounds[begin])
            computed = rows * heads * (wider_high - wider_low)
            beyond = computed - int(needed[block]) + done
            if computed <= elements and beyond <= elements // _UNREADABLE_FRACTION:
                low, high = wider_low, wider_high
                continue
        documents = document_N[begin:block]
        last_row = int(bounds[block])
        at_once = max(1, elements // (heads * (high - low)))
        for row in range(int(bounds[begin]), last_row, at_once):
            yield Chunk(
                rows=slice(row, min(row + at_once, last_row)),
                blocks=slice(low, high),
                documents=slice(int(documents.min()), int(documents.max()) + 1),
            )
        if block < blocks:
            low, high = int(first_N[block]), int(own_N[block]) + 1
            begin, done = block, int(needed[block - 1])


class DocumentMass:
    """Router mass per document and place, from some rows at a time.

    Rows are tokens, or blocks: those of blocks count once per token.
    """

    def __init__(self, layouts: LayoutPair, *, by_token: bool) -> None:
        kv_layout = layouts.kv_layout
        self._document_Q = kv_layout.document_N[layouts.kv_block(by_token=by_token)]
        # A query block speaks for all of its tokens.
        length_N = layouts.query_layout.length_N
        tokens_Q = torch.ones_like(self._document_Q) if by_token else length_N
        self._tokens_1Q = tokens_Q.double()[None]
        self._mass_SK = torch.zeros(
            *(kv_layout.documents, kv_layout.max_blocks),
            dtype=torch.float64,
            device=self._document_Q.device,
        )
        self._broken_S = self._mass_SK.new_zeros(kv_layout.documents, dtype=torch.bool)

    def add(self, rows: slice, documents: slice, mass_KY: Tensor, broken_Y: Tensor) -> None:
        """Add float64 mass by place, of rows whose documents are among ``documents``.

        Rows that are broken break their document; their mass must be 0 here.
        """
        if documents.stop - documents.start == 1:
            self._broken_S[documents] |= broken_Y.any()
            weights_SY = self._tokens_1Q[:, rows]
        else:
            document_S1 = torch.arange(documents.start, documents.stop, device=mass_KY.device)[
                :, None
            ]
            inside_SY = document_S1 == self._document_Q[rows]
            self._broken_S[documents] |= (inside_SY & broken_Y).any(1)
            weights_SY = inside_SY * self._tokens_1Q[:, rows]
        # A product, since scattered sums are not reproducible on CUDA.
        mass_SK = weights_SY @ mass_KY.t()
        places = min(mass_SK.shape[1], self._mass_SK.shape[1])
        self._mass_SK[documents, :places] += mass_SK[:, :places]

    def of_documents(self) -> Tensor:
        """float64 [S, K]; NaN in documents with mass that is not finite."""
        return self._mass_SK.masked_fill_(self._broken_S[:, None], torch.nan)


_COLUMN_BITS = 32
_BELOW_ALL_SCORES = -0x7FFFFFFF
_ABOVE_ALL_SCORES = 0x7FFFFFFF
"""Above infinity, which stands for the score of a document's first blocks."""
_ABOVE_ALL_MASS = 2.0


class RowRanker:
    """Lists and mass of one chunk after the other."""

    def __init__(self, *, softmax_scale: float, observe: bool, first_blocks: int) -> None:
        self._softmax_scale = softmax_scale
        self._observe = observe
        self._first_blocks = first_blocks

    def rank_(
        self,
        scores_CYW: Tensor,
        own_Y: Tensor,
        first_Y: Tensor,
        lists_YCK: Tensor,
        *,
        first_column: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Rank the blocks from each row's first to its own.

        Args:
            scores_CYW: float32, before the softmax scale; overwritten.
            own_Y, first_Y: int64 numbers of blocks.
            lists_YCK: int32, contiguous, written: the own block, the document's first blocks, then
                the others by falling score, -1 past the visible ones. Equal scores: the lower block
                first. NaN after all numbers.
            first_column: the block of column 0.

        Returns:
            float64 [places, Y], the softmax mass of the own block, of the first blocks, then of
            the others, the greatest first, summed over heads; and bool [Y]: rows without finite
            mass, whose mass is 0 here. None where coverage is not observed.
        """
        block_W = torch.arange(scores_CYW.shape[2], device=own_Y.device) + first_column
        hidden_YW = (block_W < first_Y[:, None]) | (block_W > own_Y[:, None])
        own_Y1 = (own_Y - first_column)[:, None]
        own_CY1 = own_Y1.expand(len(scores_CYW), -1, 1)
        # A first block that a row does not see before its own one gives way to that.
        place_I = torch.arange(min(self._first_blocks, len(block_W) - 1), device=own_Y.device)
        first_YI = torch.minimum((first_Y - first_column)[:, None] + place_I, own_Y1)
        first_CYI = first_YI.expand(len(scores_CYW), -1, -1)
        seen, places = None, lists_YCK.shape[2]
        if self._observe:
            seen = _mass_by_place(scores_CYW * self._softmax_scale, hidden_YW, own_CY1, first_CYI)
        column_CYK = _best_columns_(scores_CYW, hidden_YW, own_CY1, first_CYI, places)
        absent_YK = torch.arange(places, device=own_Y.device) > (own_Y - first_Y)[:, None]
        column_CYK.add_(first_column).masked_fill_(absent_YK, -1)
        lists_YCK.copy_(column_CYK.transpose(0, 1))
        return seen


def _best_columns_(
    scores_CYW: Tensor, hidden_YW: Tensor, own_CY1: Tensor, first_CYI: Tensor, places: int
) -> Tensor:
    """int64 [C, Y, places]: the own column, the first ones, then the others that are not hidden by
    falling score.

    Equal scores: the lower column first. NaN after all numbers. What stands in places past the
    visible columns is arbitrary. Overwrites ``scores_CYW``.

    One integer per column holds the score's bits, in an order that integers keep, above the
    column's number, so that no two are equal and any algorithm finds the same order.
    """
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


def _mass_by_place(
    scaled_CYW: Tensor, hidden_YW: Tensor, own_CY1: Tensor, first_CYI: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax mass of the own column, of the first ones, then of the others, the greatest first.

    Returns:
        float64 [W, Y], summed over heads, and bool [Y]: rows without finite mass, whose mass is 0
        here.
    """
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
