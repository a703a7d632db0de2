# SPDX-License-Identifier: Apache-2.0
"""Attention in three parts: dense documents, every query's own block, and past blocks.

A document of which everything is selected is attended to densely, on the CPU, where the host reads
lists at no wait. Own blocks need no gathering: their keys lie side by side. How past blocks are
gathered is what implementations differ in.

Shape legend: T tokens of the packed row (of queries or of keys), H query heads, G KV heads, D head
dim, N blocks of the queries' row, Q rows and C heads that select, B tokens of a query block, E of a
KV block, A tiles (query blocks of all KV heads), I rows of a tile (B * H / G), J query blocks
computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Saved, wide_dtype
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    attend_causally,
    attend_causally_backward,
    host_may_read,
    later_keys_IW,
    tiles_at_once,
)
from sparsebalance_megatron.attention.selection import Selection

_LEAST_TOKENS = 128
"""A shorter document costs more alone than among others."""


class PastBlocks(Protocol):
    """The part of a selection that reads past blocks. Tensors are of the dtype computed in."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
    ) -> None: ...

    def forward(self, out_THD: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Merge what past blocks give into the own blocks' output and LSE."""

    def backward(
        self,
        dout_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        dq_THD: Tensor,
        dk_TGD: Tensor,
        dv_TGD: Tensor,
    ) -> None:
        """Add gradients to dq, dk and dv; LSE +inf: a query that takes no part."""


def forward(
    past_blocks: type[PastBlocks],
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    selection: Selection,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """out_THD and lse_TH; see :class:`..kernel.Kernel`."""
    q, k, v = (x.to(wide_dtype(x.dtype)) for x in (q_THD, k_TGD, v_TGD))
    dense = dense_documents(selection)
    out, lse = OwnBlocks(q, k, v, dense.others, softmax_scale).forward()
    out, lse = past_blocks(q, k, v, dense.others, softmax_scale).forward(out, lse)
    dense.forward(q, k, v, out, lse, softmax_scale)
    return out.to(q_THD.dtype), lse


def backward(
    past_blocks: type[PastBlocks], dout_THD: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGD; see :class:`..kernel.Kernel`."""
    dtype, softmax_scale = wide_dtype(dout_THD.dtype), saved.softmax_scale
    inputs = dout_THD, saved.q_THD, saved.k_TGD, saved.v_TGD, saved.out_THD
    dout, q, k, v, out = (x.to(dtype) for x in inputs)
    dense = dense_documents(saved.selection)
    # A query that reads nothing has LSE -inf: with +inf its probabilities are 0.
    lse = saved.lse_TH.masked_fill(saved.lse_TH == -torch.inf, torch.inf)
    gradients = OwnBlocks(q, k, v, dense.others, softmax_scale).backward(dout, out, lse)
    past_blocks(q, k, v, dense.others, softmax_scale).backward(dout, out, lse, *gradients)
    dense.backward(dout, q, k, v, out, lse, gradients, softmax_scale)
    dq, dk, dv = (x.to(saved.q_THD.dtype) for x in gradients)
    return dq, dk, dv


class OwnBlocks:
    """The part of a selection that reads own blocks. Tensors are of the dtype computed in."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
    ) -> None:
        self._layout, self._kv_layout = selection.query_layout, selection.kv_layout
        self._heads, self._kv_heads = q_THD.shape[1], k_TGD.shape[1]
        self._q_NBHD = self._layout.to_blocks(q_THD)
        self._k_NEGD, self._v_NEGD = map(self._kv_layout.to_blocks, (k_TGD, v_TGD))
        self._softmax_scale = softmax_scale
        self._own_N = selection.own_block_N
        on_host = host_may_read(q_THD.device)
        if not on_host:
            # Whether the keys' row holds an own block stays unread: one of zeros stands in for it.
            self._k_NEGD, self._v_NEGD = map(_with_zeros, (self._k_NEGD, self._v_NEGD))
            self._own_N = self._own_N.masked_fill(self._own_N < 0, self._kv_layout.blocks)
        group = self._heads // self._kv_heads
        queries, keys = self._layout.block_tokens, self._kv_layout.block_tokens
        self._mask_1IE = later_keys_IW(queries, keys, group, q_THD.dtype, q_THD.device)[None]
        at_once = tiles_at_once(queries * group, keys, q_THD.device)
        listed_TC = own_listed_QC(selection)
        if not selection.by_token:
            listed_TC = listed_TC[self._layout.block_T]
        self._unread_TH = ~listed_TC.repeat_interleave(
            self._heads // listed_TC.shape[1], 1, output_size=self._heads
        )
        blocks_J = self._layout.number_N
        self._some_unread = True
        if on_host:
            self._some_unread = bool(self._unread_TH.any())
            if self._some_unread:
                blocks_J = self._layout.block_T[listed_TC.any(1)].unique_consecutive()
        self._chunks = blocks_J.split(max(1, at_once // self._kv_heads)) if len(blocks_J) else ()

    def forward(self) -> tuple[Tensor, Tensor]:
        """out_THD and lse_TH; 0 and -inf where a query's list lacks the own block."""
        out_NBHD = torch.zeros_like(self._q_NBHD)
        lse_NBH = out_NBHD.new_full(out_NBHD.shape[:-1], -torch.inf)
        for blocks_J in self._chunks:
            out_AID, lse_AI = attend(
                self._tiles(self._q_NBHD, blocks_J),
                *self._keys(blocks_J),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._mask_1IE,
            )
            out_NBHD.index_copy_(0, blocks_J, self._rows(out_AID))
            lse_NBH.index_copy_(0, blocks_J, self._rows(lse_AI))
        out_THD, lse_TH = map(self._layout.from_blocks, (out_NBHD, lse_NBH))
        if self._some_unread:
            out_THD = out_THD.masked_fill(self._unread_TH[..., None], 0.0)
            lse_TH = lse_TH.masked_fill(self._unread_TH, -torch.inf)
        return out_THD, lse_TH

    def backward(
        self, dout_THD: Tensor, out_THD: Tensor, lse_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients dq_THD, dk_TGD and dv_TGD; LSE +inf: a query that takes no part."""
        to_blocks, from_keys = self._layout.to_blocks, self._kv_layout.from_blocks
        if self._some_unread:
            lse_TH = lse_TH.masked_fill(self._unread_TH, torch.inf)
        dout_NBHD, out_NBHD, lse_NBH = map(to_blocks, (dout_THD, out_THD, lse_TH))
        dq_NBHD = torch.zeros_like(self._q_NBHD)
        dk_NEGD, dv_NEGD = (torch.zeros_like(self._k_NEGD) for _ in range(2))
        for blocks_J in self._chunks:
            dq_AID, dk_AED, dv_AED = attend_backward(
                self._tiles(dout_NBHD, blocks_J),
                self._tiles(self._q_NBHD, blocks_J),
                *self._keys(blocks_J),
                self._tiles(out_NBHD, blocks_J),
                self._tiles(lse_NBH, blocks_J),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._mask_1IE,
            )
            dq_NBHD.index_copy_(0, blocks_J, self._rows(dq_AID))
            own_J = self._own_N[blocks_J]
            for whole_NEGD, part_AED in ((dk_NEGD, dk_AED), (dv_NEGD, dv_AED)):
                part = part_AED.unflatten(0, (-1, self._kv_heads)).transpose(1, 2)
                # index_add_ is an order of magnitude slower on a strided source.
                whole_NEGD.index_add_(0, own_J, part.contiguous())
        dk_TGD, dv_TGD = (from_keys(x[: self._kv_layout.blocks]) for x in (dk_NEGD, dv_NEGD))
        return self._layout.from_blocks(dq_NBHD), dk_TGD, dv_TGD

    def _keys(self, blocks_J: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of own blocks, [A, E, D]."""
        own_J = self._own_N[blocks_J]
        k, v = (
            x_NEGD.index_select(0, own_J).transpose(1, 2).flatten(0, 1)
            for x_NEGD in (self._k_NEGD, self._v_NEGD)
        )
        return k, v

    def _tiles(self, x_NBH: Tensor, blocks_J: Tensor) -> Tensor:
        """Some blocks of [N, B, H, ...] as tiles [A, I, ...], all heads of a group in one."""
        x = x_NBH.index_select(0, blocks_J).unflatten(2, (self._kv_heads, -1))
        return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _rows(self, x_AI: Tensor) -> Tensor:
        """The inverse of :meth:`_tiles`."""
        x = x_AI.unflatten(0, (-1, self._kv_heads)).unflatten(2, (self._layout.block_tokens, -1))
        return x.transpose(1, 2).flatten(2, 3)


def own_listed_QC(selection: Selection) -> Tensor:
    """Which lists hold the own block of the row that selects, bool."""
    own_Q = selection.own_block_N
    if selection.by_token:
        own_Q = own_Q[selection.query_layout.block_T]
    return (selection.indices_QCK[..., 0] == own_Q[:, None]) & (selection.counts_QC > 0)


def _with_zeros(x_N: Tensor) -> Tensor:
    """One more block, of zeros."""
    return torch.cat((x_N, torch.zeros_like(x_N[:1])))


@dataclass(frozen=True, kw_only=True)
class DenseDocuments:
    """Tokens of dense documents, and the selection of all others."""

    tokens: list[slice]
    others: Selection

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        softmax_scale: float,
    ) -> None:
        """Write the output and the LSE of these documents."""
        for rows in self.tokens:
            out_THD[rows], lse_TH[rows] = attend_causally(
                q_THD[rows], k_TGD[rows], v_TGD[rows], softmax_scale=softmax_scale
            )

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
        softmax_scale: float,
    ) -> None:
        """Write these documents' rows of dq_THD, dk_TGD and dv_TGD."""
        for rows in self.tokens:
            parts = attend_causally_backward(
                *(x[rows] for x in (dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH)),
                softmax_scale=softmax_scale,
            )
            for whole, part in zip(gradients, parts, strict=True):
                whole[rows] = part


def dense_documents(selection: Selection) -> DenseDocuments:
    """Find them by their lists: each as long as what its row sees, and within the document."""
    layout = selection.query_layout
    long_enough = [
        document
        for document, blocks in enumerate(layout.blocks_per_document)
        if blocks > 1 and _tokens(selection, document) >= _LEAST_TOKENS
    ]
    none = DenseDocuments(tokens=[], others=selection)
    if not long_enough or not host_may_read(selection.counts_QC.device):
        return none
    if layout is not selection.kv_layout or not selection.own_block_N.equal(layout.number_N):
        return none
    rows = [_selecting_rows(selection, document) for document in long_enough]
    dense = [
        (document, some)
        for document, some in zip(long_enough, rows, strict=True)
        if _everything_is_listed(selection, document, some)
    ]
    counts_QC = selection.counts_QC.clone()
    for _, some in dense:
        counts_QC[some] = 0
    boundaries = layout.cu_seqlens
    return DenseDocuments(
        tokens=[slice(boundaries[document], boundaries[document + 1]) for document, _ in dense],
        others=replace(selection, counts_QC=counts_QC),
    )


def _tokens(selection: Selection, document: int) -> int:
    boundaries = selection.query_layout.cu_seqlens
    return boundaries[document + 1] - boundaries[document]


def _selecting_rows(selection: Selection, document: int) -> slice:
    layout = selection.query_layout
    if selection.by_token:
        return slice(*layout.cu_seqlens[document : document + 2])
    first = sum(layout.blocks_per_document[:document])
    return slice(first, first + layout.blocks_per_document[document])


def _everything_is_listed(selection: Selection, document: int, rows: slice) -> bool:
    layout = selection.query_layout
    own_Q = layout.block_T[rows] if selection.by_token else layout.number_N[rows]
    first = sum(layout.blocks_per_document[:document])
    counts_QC1 = selection.counts_QC[rows, :, None]
    if not bool((counts_QC1 == (own_Q - first + 1)[:, None, None]).all()):
        return False
    # The document may go on before this row's part of it: then lists reach further back.
    lists_QCK = selection.indices_QCK[rows]
    present_QCK = torch.arange(lists_QCK.shape[2]) < counts_QC1
    within_QCK = (lists_QCK >= first) & (lists_QCK <= own_Q[:, None, None])
    return bool((within_QCK | ~present_QCK).all())
