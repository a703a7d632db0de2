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
    Inputs,
    Kernel,
    Saved,
    wide_dtype,
)
from sparsebalance_megatron.attention.select import Selector
from sparsebalance_megatron.attention.select.summaries import SharedSummaries
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.pieces import DensePieces
from sparsebalance_megatron.attention.sequence.slice import SequenceExchange, SequenceSlice
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
    here = sequence.local_layout
    kernel: Kernel | None = None
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

    def forward(self, given: Inputs) -> tuple[Tensor, Tensor]:
        shape, dtype = given.q_THD.shape[:2], given.q_THD.dtype
        out_THF = given.q_THD.new_empty(*shape, given.v_TGF.shape[2])
        lse_TH = given.q_THD.new_empty(shape, dtype=wide_dtype(dtype))
        for heads, part in self._parts(given):
            out_THF[:, heads], lse_TH[:, heads] = self.kernel.forward(part)
        return out_THF, lse_TH

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        (q_THD, k_TGD, v_TGF), dtype = saved.qkv, wide_dtype(saved.q_THD.dtype)
        dq_THD = torch.empty_like(q_THD)

        def of_parts() -> Iterator[Tensor]:
            for heads, part in self._parts(saved):
                out_THF, lse_TH = saved.out_THF[:, heads], saved.lse_TH[:, heads]
                of_part = replace(part, out_THF=out_THF, lse_TH=lse_TH)
                dq_THD[:, heads], *dkv = self.kernel.backward(dout_THF[:, heads], of_part)
                yield torch.cat(dkv, 2).to(dtype)

        dkv_TGE = self.exchange.gradient(of_parts(), k_TGD.dtype, self.sequence)
        dk_TGD, dv_TGF = dkv_TGE.to(k_TGD.dtype).split((k_TGD.shape[2], v_TGF.shape[2]), 2)
        return dq_THD, dk_TGD, dv_TGF

    def _parts[Given: Inputs](self, given: Given) -> Iterator[tuple[slice, Given]]:
        """The query heads that read a part, and what they attend to."""
        first, group = 0, given.q_THD.shape[1] // given.k_TGD.shape[1]
        keys = given.k_TGD, given.v_TGF, given.selection
        for k_TGD, v_TGF, selection in self.exchange.parts(*keys, self.sequence):
            heads = slice(first, first + group * k_TGD.shape[1])
            q_THD = given.q_THD[:, heads]
            part = replace(given, q_THD=q_THD, k_TGD=k_TGD, v_TGF=v_TGF, selection=selection)
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
