# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as one differentiable operation.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row, K width of lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebalance_megatron.attention.impl.triton.backward import backward_attention
from sparsebalance_megatron.attention.impl.triton.forward import forward_attention
from sparsebalance_megatron.attention.selection import Selection


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a query-block selection; see :func:`...api.block_sparse_attention`.

    Products take the inputs' dtype and accumulate in float32. Results repeat bit by bit. Neither
    pass reads the device from the host, and budgets or tokens that change compile nothing.

    Raises:
        ValueError: ``softmax_scale`` is not positive.
    """
    if not softmax_scale > 0.0:
        raise ValueError(
            f"block_sparse_attention: softmax_scale {softmax_scale}: must be positive for "
            'implementation "triton"; negate the queries instead'
        )
    return _TritonAttention.apply(
        q_THD,
        k_TGD,
        v_TGD,
        selection.indices_RCK,
        selection.counts_RC,
        selection.layout,
        softmax_scale,
    )


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        indices_NGK: Tensor,
        counts_NG: Tensor,
        layout: Any,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        selection = _selection(indices_NGK, counts_NG, layout)
        out_THD, lse_TH = forward_attention(
            q_THD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale
        )
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_NGK, counts_NG)
        ctx.layout, ctx.softmax_scale = layout, softmax_scale
        ctx.mark_non_differentiable(lse_TH)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_NGK, counts_NG = ctx.saved_tensors
        gradients = backward_attention(
            dout_THD,
            q_THD,
            k_TGD,
            v_TGD,
            out_THD,
            lse_TH,
            _selection(indices_NGK, counts_NG, ctx.layout),
            softmax_scale=ctx.softmax_scale,
        )
        return *gradients, None, None, None, None


def _selection(indices_NGK: Tensor, counts_NG: Tensor, layout: Any) -> Selection:
    return Selection(
        granularity="query-block", indices_RCK=indices_NGK, counts_RC=counts_NG, layout=layout
    )
