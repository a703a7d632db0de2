# SPDX-License-Identifier: Apache-2.0
"""Dense attention of a slice's queries to all tokens of their documents up to themselves.

Of a document a slice holds runs of neighbouring tokens, in any number and at any place.

1. The document's tokens in the slice, one after the other, attend to one another: a causal square.
2. Before each run lies a gap, whose tokens the slice does not hold. The run and all runs after it
   read all of these: a full rectangle for each gap.
3. Outputs of the square and the rectangles are merged by their log-sum-exp. Gradients of the pieces
   add up, computed from the merged outputs.

The first rectangles of all documents are one call of the kernel, so are the second ones, and so on.
Whoever holds which tokens, values are the same to rounding; the work of a member follows from it.

Shape legend: T tokens of the slice, or of the sequence (keys and values).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import (
    Inputs,
    Kernel,
    Saved,
    merge_partials,
    wide_dtype,
)
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.slice import SequenceSlice


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Documents of queries and of keys: the numbers of their tokens, in the slice and in the
    sequence, and how dense attention reads them."""

    query_T: Tensor
    key_T: Tensor
    selection: Selection

    def of[Given: Inputs](self, given: Given) -> Given:
        """The inputs of these documents."""
        q_THD, k_TGD, v_TGF = given.qkv
        q_THD, k_TGD, v_TGF = q_THD[self.query_T], k_TGD[self.key_T], v_TGF[self.key_T]
        return replace(given, q_THD=q_THD, k_TGD=k_TGD, v_TGF=v_TGF, selection=self.selection)


@dataclass(frozen=True, kw_only=True)
class DensePieces:
    """A :class:`..kernels.contract.Kernel`: a slice's first documents are attended to densely.

    ``dense``: attends to whole documents. ``lists``: attends to the others by their lists, of which
    the first documents have none; None where there are no others.
    """

    sequence: SequenceSlice
    documents: int
    dense: Kernel
    lists: Kernel | None = None

    def forward(self, given: Inputs) -> tuple[Tensor, Tensor]:
        wide, shape = wide_dtype(given.q_THD.dtype), given.q_THD.shape[:2]
        out_THF = given.q_THD.new_zeros(*shape, given.v_TGF.shape[2], dtype=wide)
        lse_TH = given.q_THD.new_full(shape, -float("inf"), dtype=wide)
        if self.lists is not None:
            out_THF, lse_TH = self.lists.forward(given)
            out_THF = out_THF.to(wide)
        for piece in self.pieces():
            out, lse = self.dense.forward(piece.of(given))
            found = out_THF[piece.query_T], lse_TH[piece.query_T]
            out, lse = merge_partials(*found, out.to(wide), lse)
            out_THF.index_copy_(0, piece.query_T, out)
            lse_TH.index_copy_(0, piece.query_T, lse)
        return out_THF.to(given.q_THD.dtype), lse_TH

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        dtype = dout_THF.dtype
        sums = [x.new_zeros(x.shape, dtype=wide_dtype(dtype)) for x in saved.qkv]
        if self.lists is not None:
            sums = [x.to(wide_dtype(dtype)) for x in self.lists.backward(dout_THF, saved)]
        for piece in self.pieces():
            rows = piece.query_T, piece.key_T, piece.key_T
            out_THF, lse_TH, dout = (x[rows[0]] for x in (saved.out_THF, saved.lse_TH, dout_THF))
            of_piece = replace(piece.of(saved), out_THF=out_THF, lse_TH=lse_TH)
            parts = self.dense.backward(dout, of_piece)
            for total, row_T, part in zip(sums, rows, parts, strict=True):
                total.index_add_(0, row_T, part.to(total.dtype))
        dq_THD, dk_TGD, dv_TGF = (x.to(dtype) for x in sums)
        return dq_THD, dk_TGD, dv_TGF

    def pieces(self) -> Sequence[Piece]:
        """The square and the rectangles; made once for a slice."""
        if self.documents not in self.sequence.pieces:
            self.sequence.pieces[self.documents] = self._pieces()
        found: Sequence[Piece] = self.sequence.pieces[self.documents]
        return found

    def _pieces(self) -> list[Piece]:
        held_T, boundaries = self.sequence.tokens_T, self.sequence.cu_seqlens
        squares: list[tuple[np.ndarray, np.ndarray]] = []
        rectangles: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for first, end in pairwise(boundaries[: self.documents + 1]):
            a, b = np.searchsorted(held_T, (first, end))
            own_T, level = held_T[a:b], 0
            if a == b:
                continue
            squares.append((np.arange(a, b), own_T))
            runs = np.flatnonzero(np.diff(own_T, prepend=own_T[0] - 2) != 1)
            for run, before in zip(runs, (first, *(own_T[runs[1:] - 1] + 1)), strict=True):
                if before < own_T[run]:
                    rectangles.extend([] for _ in range(level + 1 - len(rectangles)))
                    rectangles[level].append((np.arange(a + run, b), np.arange(before, own_T[run])))
                    level += 1
        pieces = [self._piece(squares, causal=True)] if squares else []
        return pieces + [self._piece(each, causal=False) for each in rectangles]

    def _piece(self, parts: Sequence[tuple[np.ndarray, np.ndarray]], *, causal: bool) -> Piece:
        """``parts``: tokens of queries and of keys, document by document."""
        layouts = [
            packed_layout(
                np.cumsum([0, *map(len, tokens)]), self.sequence.block_size, self.sequence.device
            )
            for tokens in zip(*parts, strict=True)
        ]
        query_T, key_T = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Piece(
            query_T=self.sequence.on_device(query_T),
            key_T=self.sequence.on_device(key_T),
            selection=Selection.of_documents(layouts[0], None if causal else layouts[1]),
        )
