# SPDX-License-Identifier: Apache-2.0
"""Interface of attention implementations, and the autograd function over any of them.

Shape legend: T tokens of the packed sequence (of queries or of keys, which may differ).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebalance_megatron.attention.device import undisturbed
from sparsebalance_megatron.attention.selection import Selection

_NOTHING = torch.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Queries, keys and values that fit a selection, and the factor on q . k."""

    q_THD: Tensor
    k_TGD: Tensor
    v_TGF: Tensor
    selection: Selection
    softmax_scale: float

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_THD, self.k_TGD, self.v_TGF


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved(Inputs):
    """Inputs and results of a forward pass, kept for the backward pass.

    ``out_THF`` and ``lse_TH`` may be those of several parts, merged by :func:`merge_partials`. The
    gradients of the parts then add up to those of attention over the union of their lists.
    """

    out_THF: Tensor
    lse_TH: Tensor


class Kernel(Protocol):
    """Both passes of attention. Autograd sees neither."""

    def forward(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """Attend over the lists: out_THF and lse_TH, as :func:`..api.block_sparse_attention` says,
        without a sink."""

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in their dtypes."""


class Implementation(Kernel, Protocol):
    """A module ``attention/kernels/<name>``, which runs only where ``obstacle`` finds nothing."""

    def obstacle(self, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
        """Say why the implementation does not serve, and the remedy; None where it serves."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums take: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Attention(torch.autograd.Function):
    """Gives out_THF and lse_TH, as :func:`..api.block_sparse_attention` says; inside
    ``torch.autocast`` as outside."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGF: Tensor,
        sink_H: Tensor | None,
        selection: Selection,
        softmax_scale: float,
        kernel: Kernel,
    ) -> tuple[Tensor, Tensor]:
        given = Inputs(
            q_THD=q_THD,
            k_TGD=k_TGD,
            v_TGF=v_TGF,
            selection=selection,
            softmax_scale=softmax_scale,
        )
        with undisturbed(q_THD.device):
            out_THF, lse_TH = kernel.forward(given)
            if sink_H is not None:
                out_THF, lse_TH = _with_sink(out_THF, lse_TH, sink_H)
        # Lists are saved as tensors, so that recomputation and offloading can let go of them.
        tensors = q_THD, k_TGD, v_TGF, out_THF, lse_TH, sink_H
        ctx.save_for_backward(*tensors, *selection.tensors())
        ctx.selection = selection.with_tensors([_NOTHING] * 3)
        ctx.softmax_scale, ctx.kernel = softmax_scale, kernel
        ctx.mark_non_differentiable(lse_TH)
        return out_THF, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THF: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGF, out_THF, lse_TH, sink_H, *lists = ctx.saved_tensors
        saved = Saved(
            q_THD=q_THD,
            k_TGD=k_TGD,
            v_TGF=v_TGF,
            out_THF=out_THF,
            lse_TH=lse_TH,
            selection=ctx.selection.with_tensors(lists),
            softmax_scale=ctx.softmax_scale,
        )
        with undisturbed(dout_THF.device):
            # The sink is a part like others: the output and LSE of all parts serve the kernel.
            gradients = ctx.kernel.backward(dout_THF, saved)
            dsink_H = None if sink_H is None else _sink_gradient(dout_THF, saved, sink_H)
        return *gradients, dsink_H, None, None, None


def _with_sink(out_THF: Tensor, lse_TH: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention that reads the sink besides, from attention without it."""
    total_TH = torch.logaddexp(lse_TH, sink_H.to(lse_TH.dtype))
    share_TH1 = (lse_TH - total_TH).exp_()[..., None]
    return (out_THF * share_TH1).to(out_THF.dtype), total_TH


def _sink_gradient(dout_THF: Tensor, saved: Saved, sink_H: Tensor) -> Tensor:
    """The sink's probability times what a key of value 0 adds to the loss, summed over queries."""
    wide = saved.lse_TH.dtype
    delta_TH = (dout_THF.to(wide) * saved.out_THF.to(wide)).sum(-1)
    return -((sink_H.to(wide) - saved.lse_TH).exp_() * delta_TH).sum(0).to(sink_H.dtype)


def merge_partials(
    out_a_THF: Tensor, lse_a_TH: Tensor, out_b_THF: Tensor, lse_b_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint lists, from the parts' outputs and LSEs.

    An empty list is out 0, lse -inf. The result has the dtypes of the first part.
    """
    peak_TH = torch.maximum(lse_a_TH, lse_b_TH)
    peak_TH = peak_TH.masked_fill(peak_TH == -torch.inf, 0.0)
    weight_a_TH = torch.exp(lse_a_TH - peak_TH)
    weight_b_TH = torch.exp(lse_b_TH - peak_TH)
    total_TH = weight_a_TH + weight_b_TH
    empty_TH = total_TH == 0.0
    total_TH = total_TH.masked_fill(empty_TH, 1.0)
    share_a_TH1 = (weight_a_TH / total_TH).unsqueeze(-1)
    share_b_TH1 = (weight_b_TH / total_TH).unsqueeze(-1)
    out_THF = share_a_TH1 * out_a_THF + share_b_TH1 * out_b_THF
    lse_TH = (peak_TH + torch.log(total_TH)).masked_fill(empty_TH, -torch.inf)
    return out_THF.to(out_a_THF.dtype), lse_TH
