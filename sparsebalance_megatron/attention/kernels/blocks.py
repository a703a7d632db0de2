# SPDX-License-Identifier: Apache-2.0
"""Attention over the blocks and columns of lists, on any device.

Three parts make it up: dense documents, every query's own block, and past blocks. A document of
which everything is selected is attended to densely on the CPU. How past blocks are gathered is what
implementations differ in: here by query block, in :mod:`.tokens` by token.

Shape legend: T tokens of the packed sequence (of queries or of keys), N blocks of the queries, Q
rows and C heads that select.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernels.contract import Saved, wide_dtype
from sparsebalance_megatron.attention.kernels.dense import (
    add_gradients_of_documents,
    attend_to_documents,
)
from sparsebalance_megatron.attention.kernels.gathered import (
    GatheredLists,
    own_blocks,
    own_listed_QC,
)
from sparsebalance_megatron.attention.kernels.tile_attention import takes_flash
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

_LEAST_DENSE_TOKENS = 128
"""A shorter document costs more alone than among others."""


class Part(Protocol):
    """Some entries of a selection's lists. Tensors are of the dtype computed in."""

    def forward(self, out_THF: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Merge what these entries give into the output and LSE of others."""

    def backward(
        self, dout_THF: Tensor, out_THF: Tensor, lse_TH: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        """Add to dq_THD, dk_TGD and dv_TGF, from the output and LSE of all entries; a query whose
        LSE is +inf takes no part."""


@dataclass(frozen=True, kw_only=True)
class AssembledKernel:
    """A :class:`.contract.Kernel` of selections by token, or of those by query block.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so. ``past_blocks`` gives the parts
    that read past blocks, from q_THD, k_TGD, v_TGF, a selection and the softmax scale.
    """

    past_blocks: Callable[[Tensor, Tensor, Tensor, Selection, float], Sequence[Part]]
    by_token: bool

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGF: Tensor,
        selection: Selection,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(wide_dtype(x.dtype)) for x in (q_THD, k_TGD, v_TGF))
        documents, others = split_dense_documents(selection)
        out, lse = own_blocks(q, k, v, others, softmax_scale).attend()
        for part in self.past_blocks(q, k, v, others, softmax_scale):
            out, lse = part.forward(out, lse)
        attend_to_documents(documents, (q, k, v), (out, lse), softmax_scale)
        return out.to(q_THD.dtype), lse

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        dtype, softmax_scale = wide_dtype(dout_THF.dtype), saved.softmax_scale
        inputs = dout_THF, saved.q_THD, saved.k_TGD, saved.v_TGF, saved.out_THF
        dout, q, k, v, out = (x.to(dtype) for x in inputs)
        documents, others = split_dense_documents(saved.selection)
        # A query that reads nothing has LSE -inf: with +inf its probabilities are 0.
        lse = saved.lse_TH.masked_fill(saved.lse_TH == -torch.inf, torch.inf)
        gradients = own_blocks(q, k, v, others, softmax_scale).gradients(dout, out, lse)
        for part in self.past_blocks(q, k, v, others, softmax_scale):
            part.backward(dout, out, lse, gradients)
        add_gradients_of_documents(documents, (dout, q, k, v, out, lse), gradients, softmax_scale)
        dq, dk, dv = (x.to(saved.q_THD.dtype) for x in gradients)
        return dq, dk, dv

    def obstacle(self, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
        if selection.by_token and not self.by_token:
            return 'serves selections by query block, not by token: use "tokens" or "auto"'
        if self.by_token and not selection.by_token:
            return 'serves selections by token, not by query block: use "auto"'
        return None


def split_dense_documents(selection: Selection) -> tuple[list[slice], Selection]:
    """The tokens of documents whose lists hold all that their queries may see, and the selection of
    all others."""
    layout, own_N = selection.query_layout, selection.own_block_N
    if not takes_flash(own_N.device) or layout is not selection.kv_layout:
        return [], selection
    if not own_N.equal(layout.number_N):
        return [], selection
    documents, counts_QC = [], selection.counts_QC.clone()
    first_blocks = layout.first_block_S.tolist()
    sizes = zip(pairwise(layout.cu_seqlens), layout.blocks_per_document, strict=True)
    for first, ((begin, end), blocks) in zip(first_blocks, sizes, strict=True):
        if blocks == 1 or end - begin < _LEAST_DENSE_TOKENS:
            continue
        rows = slice(begin, end) if selection.by_token else slice(first, first + blocks)
        own_Q = layout.block_T[rows] if selection.by_token else layout.number_N[rows]
        if _everything_is_listed(selection, rows, own_Q[:, None, None], first):
            documents.append(slice(begin, end))
            counts_QC[rows] = 0
    return documents, replace(selection, counts_QC=counts_QC)


def _everything_is_listed(
    selection: Selection, rows: slice, own_Q11: Tensor, first_block: int
) -> bool:
    counts_QC1 = selection.counts_QC[rows, :, None]
    if not bool((counts_QC1 == own_Q11 - first_block + 1).all()):
        return False
    # A document may begin before the sequence does; then lists reach further back.
    lists_QCK = selection.indices_QCK[rows]
    past_end_QCK = torch.arange(lists_QCK.shape[2]) >= counts_QC1
    inside_QCK = (lists_QCK >= first_block) & (lists_QCK <= own_Q11)
    return bool((inside_QCK | past_end_QCK).all())


def _past_blocks(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, softmax_scale: float
) -> list[GatheredLists]:
    """Past blocks, and columns where there are any."""
    own_NG, columns = own_listed_QC(selection), selection.columns
    # The own block comes first, and is left out.
    lists_NGK = selection.indices_QCK.int()
    lists_NGK = torch.where(own_NG[..., None], pad(lists_NGK[..., 1:], (0, 1), value=-1), lists_NGK)
    counts_NG = selection.counts_QC - own_NG.to(selection.counts_QC.dtype)

    def part(lists_NGK: Tensor, counts_NG: Tensor, units: PackedLayout | None) -> GatheredLists:
        lists = lists_NGK, counts_NG, selection.query_layout, units
        return GatheredLists(q_THD, k_TGD, v_TGF, *lists, softmax_scale)

    parts = [part(lists_NGK, counts_NG, selection.kv_layout)]
    if columns is not None and columns.tokens_NGK.shape[2]:
        parts.append(part(columns.tokens_NGK, columns.counts_NG, None))
    return parts


_KERNEL = AssembledKernel(past_blocks=_past_blocks, by_token=False)
forward, backward, obstacle = _KERNEL.forward, _KERNEL.backward, _KERNEL.obstacle
