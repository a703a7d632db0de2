# SPDX-License-Identifier: Apache-2.0
"""Dense attention of tiles, forward and backward.

On the CPU torch's own flash kernel computes, the one behind ``scaled_dot_product_attention``: it
gives the LSE, and its backward pass takes an output and an LSE from outside, so that parts add up.
It cuts tiles by their shape alone, so that the rows beside a row change none of its bits.
Elsewhere torch's products compute.

Shape legend: A tiles, I rows of a tile, W keys of a tile, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_SCORES_AT_ONCE = 1 << 18
"""Scores of tiles computed in one call, per thread; on the CPU what is gathered for them fits into
a core's second-level cache."""


def host_may_read(device: torch.device) -> bool:
    """Whether the host can read tensors of ``device`` without waiting for it."""
    return device.type == "cpu"


def tiles_at_once(rows: int, keys: int, device: torch.device) -> int:
    """How many tiles of ``rows`` rows and ``keys`` keys go into one call, at least 1."""
    threads = torch.get_num_threads() if host_may_read(device) else 64
    return max(1, threads * _SCORES_AT_ONCE // (rows * keys))


def attend(
    q_AID: Tensor,
    k_AWD: Tensor,
    v_AWD: Tensor,
    *,
    softmax_scale: float,
    mask_AIW: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend from every row of a tile to all of its keys.

    Args:
        q_AID, k_AWD, v_AWD: one dtype, float32 or float64.
        softmax_scale: factor on q . k.
        mask_AIW: added to the scaled scores; sizes of 1 are broadcast. Off the CPU a row may be all
            -inf: its output is 0, its LSE -inf.
        causal: whether row i reads keys 0 to i only; on the CPU, without a mask.

    Returns:
        out_AID and the natural log-sum-exp lse_AI.
    """
    if host_may_read(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        q, k, v = (x[:, None] for x in (q_AID, k_AWD, v_AWD))
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=softmax_scale)
        return out[:, 0], lse[:, 0]
    s_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW)
    lse_AI = s_AIW.logsumexp(-1)
    # An LSE of -inf would make scores of -inf NaN.
    p_AIW = s_AIW.sub_(lse_AI.clamp(min=torch.finfo(lse_AI.dtype).min)[..., None]).exp_()
    return torch.bmm(p_AIW, v_AWD), lse_AI


def attend_backward(
    dout_AID: Tensor,
    q_AID: Tensor,
    k_AWD: Tensor,
    v_AWD: Tensor,
    out_AID: Tensor,
    lse_AI: Tensor,
    *,
    softmax_scale: float,
    mask_AIW: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from an output and an LSE that may be those of several parts.

    A row whose LSE is +inf has probabilities of 0: it gets no gradient and gives none.
    """
    if host_may_read(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        tensors = (x[:, None] for x in (dout_AID, q_AID, k_AWD, v_AWD, out_AID, lse_AI))
        gradients = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=softmax_scale)
        dq_AID, dk_AWD, dv_AWD = (x[:, 0] for x in gradients)
        return dq_AID, dk_AWD, dv_AWD
    p_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW).sub_(lse_AI[..., None]).exp_()
    dv_AWD = torch.bmm(p_AIW.transpose(1, 2), dout_AID)
    ds_AIW = torch.bmm(dout_AID, v_AWD.transpose(1, 2))
    ds_AIW.sub_((dout_AID * out_AID).sum(-1, keepdim=True)).mul_(p_AIW).mul_(softmax_scale)
    return torch.bmm(ds_AIW, k_AWD), torch.bmm(ds_AIW.transpose(1, 2), q_AID), dv_AWD


def _scores(q_AID: Tensor, k_AWD: Tensor, softmax_scale: float, mask_AIW: Tensor | None) -> Tensor:
    s_AIW = torch.bmm(q_AID, k_AWD.transpose(1, 2)).mul_(softmax_scale)
    return s_AIW if mask_AIW is None else s_AIW.add_(mask_AIW)
