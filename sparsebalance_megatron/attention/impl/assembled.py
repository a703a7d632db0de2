# SPDX-License-Identifier: Apache-2.0
"""Attention put together: dense documents, own blocks, and past blocks, which are gathered.

Shape legend: T tokens of the packed row (of queries or of keys), H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparsebalance_megatron.attention.impl.dense_documents import dense_documents
from sparsebalance_megatron.attention.impl.own_blocks import OwnBlocks
from sparsebalance_megatron.attention.kernel import wide_dtype
from sparsebalance_megatron.attention.selection import Selection


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
    past_blocks: type[PastBlocks],
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    selection: Selection,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_THD, dk_TGD and dv_TGD; see :class:`..kernel.Kernel`."""
    dtype = wide_dtype(q_THD.dtype)
    dout, q, k, v, out = (x.to(dtype) for x in (dout_THD, q_THD, k_TGD, v_TGD, out_THD))
    dense = dense_documents(selection)
    # A query that reads nothing has LSE -inf: with +inf its probabilities are 0.
    lse = lse_TH.masked_fill(lse_TH == -torch.inf, torch.inf)
    gradients = OwnBlocks(q, k, v, dense.others, softmax_scale).backward(dout, out, lse)
    past_blocks(q, k, v, dense.others, softmax_scale).backward(dout, out, lse, *gradients)
    dense.backward(dout, q, k, v, out, lse, gradients, softmax_scale)
    dq, dk, dv = (x.to(q_THD.dtype) for x in gradients)
    return dq, dk, dv
