# SPDX-License-Identifier: Apache-2.0
"""Any implementation of attention as one differentiable operation.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebalance_megatron.attention.kernel import Kernel, Saved
from sparsebalance_megatron.attention.precision import undisturbed
from sparsebalance_megatron.attention.selection import Selection


class Attention(torch.autograd.Function):
    """``apply(q_THD, k_TGD, v_TGD, selection, softmax_scale, kernel, known)``: out_THD and lse_TH.

    ``known`` is None, or the out_THD and lse_TH of an earlier call with the same arguments, which
    are then given back as they are. It is differentiable in q, k and v through the output alone.
    Inside ``torch.autocast`` it computes as outside.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
        kernel: Kernel,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        if known is not None:
            out_THD, lse_TH = known
        else:
            with undisturbed(q_THD.device):
                out_THD, lse_TH = kernel.forward(
                    q_THD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale
                )
        # Lists are saved as tensors, so that recomputation and offloading can let go of them.
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH, *selection.tensors())
        ctx.by_token = selection.by_token
        ctx.layouts = selection.query_layout, selection.kv_layout
        ctx.softmax_scale, ctx.kernel = softmax_scale, kernel
        ctx.mark_non_differentiable(lse_TH)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH, *lists = ctx.saved_tensors
        query_layout, kv_layout = ctx.layouts
        selection = Selection.of_tensors(
            lists, by_token=ctx.by_token, query_layout=query_layout, kv_layout=kv_layout
        )
        saved = Saved(
            q_THD=q_THD,
            k_TGD=k_TGD,
            v_TGD=v_TGD,
            out_THD=out_THD,
            lse_TH=lse_TH,
            selection=selection,
            softmax_scale=ctx.softmax_scale,
        )
        with undisturbed(dout_THD.device):
            gradients = ctx.kernel.backward(dout_THD, saved)
        return *gradients, None, None, None, None
