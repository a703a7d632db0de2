# SPDX-License-Identifier: Apache-2.0
"""Documents of which everything is selected: there attention is dense, and nothing is gathered.

Only the CPU looks for them, where the host reads lists at no wait.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, Q rows and C heads
that select.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebalance_megatron.attention.impl.tile_attention import (
    attend_causally,
    attend_causally_backward,
    host_may_read,
)
from sparsebalance_megatron.attention.selection import Selection

_LEAST_TOKENS = 128
"""A shorter document costs more alone than among others."""


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
