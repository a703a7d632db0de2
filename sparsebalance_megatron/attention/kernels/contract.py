# SPDX-License-Identifier: Apache-2.0
"""What every implementation of attention offers, and autograd over any of them.

Shape legend: T tokens of the packed sequence (of queries or of keys, which may differ), H query
heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebalance_megatron.attention.precision import undisturbed
from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """What a forward pass read and gave, for the backward pass.

    ``out_THD`` and ``lse_TH`` may be those of several parts, put together by
    :func:`.merge.merge_partials`: the gradients of the parts then add up to the gradients of
    attention over the union of their lists.
    """

    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    out_THD: Tensor
    lse_TH: Tensor
    selection: Selection
    softmax_scale: float


class Kernel(Protocol):
    """A module ``attention/kernels/<name>``.

    Its functions are called with tensors that fit the selection, and only where ``obstacle`` finds
    nothing. Autograd sees none of them.
    """

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend over the lists.

        Returns:
            out_THD in the inputs' dtype, and lse_TH: the natural log-sum-exp of the scaled scores
            that were read, in float32 (float64 for float64 inputs). A query that reads nothing has
            out 0 and lse -inf.
        """

    def backward(self, dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in their dtypes."""

    def obstacle(self, q_THD: Tensor, selection: Selection) -> str | None:
        """Say why the implementation does not serve, and the remedy; None where it serves."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` take: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def obstacle_of_lists(selection: Selection, *, by_token: bool) -> str | None:
    """Say that an implementation serves the other kind of selection only."""
    if selection.by_token and not by_token:
        return 'serves selections by query block, not by token: use "tokens" or "auto"'
    if by_token and not selection.by_token:
        return 'serves selections by token, not by query block: use "auto"'
    return None


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
