# SPDX-License-Identifier: Apache-2.0
"""Attention of a slice's queries over the packed sequence that the slice is part of.

Shape legend: T tokens of a slice (of the packed sequence, where an exchange gives it).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sparsebalance_megatron.attention.api import check_dense, checked_kernel
from sparsebalance_megatron.attention.kernels.contract import (
    Attention,
    Kernel,
    Saved,
    wide_dtype,
)
from sparsebalance_megatron.attention.select import Selector
from sparsebalance_megatron.attention.select.summaries import SharedSummaries
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.pieces import DensePieces
from sparsebalance_megatron.attention.sequence.slice import Part, SequenceExchange, SequenceSlice
from sparsebalance_megatron.config import AttentionImplementation, DenseAttention


def sequence_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    selection: Selection,
    sequence: SequenceSlice,
    *,
    exchange: SequenceExchange,
    softmax_scale: float,
    implementation: AttentionImplementation = "auto",
    dense_documents: int = 0,
    dense_kernel: DenseAttention = "auto",
    sink_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`..api.block_sparse_attention` where this rank holds a slice of the sequence.

    All members of the group call it at the same place of their programs. Its results are those of
    one rank that holds the sequence, to rounding, and the same bits each time. Tensors are those of
    the slice.

    Args:
        selection: lists of the slice's queries over the blocks of the sequence.
        exchange: how other keys and values get here.
        dense_documents: so many first documents are attended to densely (:mod:`.pieces`), whatever
            their lists, by ``dense_kernel``; where there are no others, the selection needs none.

    Raises:
        ValueError: as :func:`..api.block_sparse_attention`; or the selection belongs to another
            slice.
    """
    layouts = selection.query_layout, selection.kv_layout
    if layouts[0] is not sequence.local_layout or layouts[1] is not sequence.whole_layout:
        raise ValueError(
            "sequence_attention: the selection was not made for this slice: its layouts must be "
            "the slice's local_layout and whole_layout"
        )
    # What is checked are the tensors that are here.
    here, kernel = sequence.local_layout, None
    if dense_documents < sequence.whole_layout.documents:
        listed = replace(selection, kv_layout=here)
        kernel = checked_kernel(q_THD, k_TGD, v_TGF, listed, implementation, sink_H)
    if kernel is None or dense_documents:
        dense = check_dense(q_THD, k_TGD, v_TGF, here, dense_kernel, sink_H)
        if kernel is not None:
            rows = sequence.rows_of(dense_documents, by_token=selection.by_token)
            selection = selection.without_first(rows)
        kernel = DensePieces(
            sequence=sequence, documents=dense_documents, dense=dense, lists=kernel
        )
    exchanging = ExchangingKernel(exchange=exchange, sequence=sequence, kernel=kernel)
    return Attention.apply(*(q_THD, k_TGD, v_TGF, sink_H, selection, softmax_scale, exchanging))


@dataclass(frozen=True, kw_only=True)
class ExchangingKernel:
    """A :class:`..kernels.contract.Kernel` over the parts that an exchange gives to another one."""

    exchange: SequenceExchange
    sequence: SequenceSlice
    kernel: Kernel

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGF: Tensor,
        selection: Selection,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        out_THF = q_THD.new_empty(*q_THD.shape[:2], v_TGF.shape[2])
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype))
        for heads, part in self._parts(q_THD, k_TGD, v_TGF, selection):
            out_THF[:, heads], lse_TH[:, heads] = self.kernel.forward(
                q_THD[:, heads], *part, softmax_scale=softmax_scale
            )
        return out_THF, lse_TH

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        given = q_THD, k_TGD, v_TGF, _ = saved.q_THD, saved.k_TGD, saved.v_TGF, saved.selection
        dq_THD = torch.empty_like(q_THD)

        def of_parts() -> Iterator[Tensor]:
            for heads, (k_part_TGD, v_part_TGF, selection) in self._parts(*given):
                of_part = replace(
                    saved,
                    q_THD=q_THD[:, heads],
                    k_TGD=k_part_TGD,
                    v_TGF=v_part_TGF,
                    out_THF=saved.out_THF[:, heads],
                    lse_TH=saved.lse_TH[:, heads],
                    selection=selection,
                )
                dq_THD[:, heads], *dkv = self.kernel.backward(dout_THF[:, heads], of_part)
                yield torch.cat(dkv, 2).to(wide_dtype(q_THD.dtype))

        dkv_TGE = self.exchange.gradient(of_parts(), k_TGD.dtype, self.sequence)
        dk_TGD, dv_TGF = dkv_TGE.to(k_TGD.dtype).split((k_TGD.shape[2], v_TGF.shape[2]), 2)
        return dq_THD, dk_TGD, dv_TGF

    def obstacle(self, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
        return self.kernel.obstacle(q_THD, v_TGF, selection)

    def _parts(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection
    ) -> Iterator[tuple[slice, Part]]:
        """Every part, and the query heads that read it."""
        first, group = 0, q_THD.shape[1] // k_TGD.shape[1]
        for part in self.exchange.parts(k_TGD, v_TGF, selection, self.sequence):
            heads = slice(first, first + group * part[0].shape[1])
            yield heads, part
            first = heads.stop


@torch.no_grad()
def rank_slice[Ranked](
    selector: Selector[Any, Ranked],
    q_THD: Tensor,
    k_TGD: Tensor,
    sequence: SequenceSlice,
    *,
    exchange: SequenceExchange,
    softmax_scale: float,
    max_budget: int,
    observe: bool,
) -> Ranked:
    """Rank for the slice's queries, over the blocks of the sequence, as one rank that holds the
    sequence would rank them.

    The mass is that of all slices' queries, the same bits for each.
    """
    own: SharedSummaries = selector.summaries(q_THD, k_TGD, sequence.local_layout)
    summaries = exchange.summaries(own.parts(sequence.local_layout), sequence)
    ranking: Any = selector.rank(
        q_THD,
        own.joined(summaries, sequence.whole_layout),
        sequence.layouts,
        softmax_scale=softmax_scale,
        max_budget=max_budget,
        observe=observe,
    )
    if ranking.mass_SK is not None:
        ranking = replace(ranking, mass_SK=exchange.total_mass(ranking.mass_SK, sequence))
    return cast("Ranked", ranking)
