# SPDX-License-Identifier: Apache-2.0
"""Dense attention of tiles, forward and backward.

On the CPU torch's own flash kernel computes, the one behind ``scaled_dot_product_attention``: it
gives the LSE, and its backward pass takes an output and an LSE from outside, so that parts add up.
It cuts tiles by their shape alone, so that the rows beside a row change none of its bits.
Elsewhere torch's products compute.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_SCORES_AT_ONCE = 1 << 18
"""Scores of tiles computed in one call, per thread; on the CPU what is gathered for them fits into
a core's second-level cache."""


def takes_flash(device: torch.device) -> bool:
    """Whether torch's flash kernel for CPUs computes."""
    return device.type == "cpu"


def tiles_at_once(rows: int, keys: int, device: torch.device) -> int:
    """Number of tiles of ``rows`` rows and ``keys`` keys that one call computes, at least 1."""
    threads = torch.get_num_threads() if takes_flash(device) else 64
    return max(1, threads * _SCORES_AT_ONCE // (rows * keys))


def attend(
    q_AID: Tensor,
    k_AWD: Tensor,
    v_AWF: Tensor,
    *,
    softmax_scale: float,
    mask_AIW: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend from every row of a tile to all of its keys: out_AIF, and the natural LSE lse_AI.

    Args:
        mask_AIW: added to the scaled scores; sizes of 1 are broadcast. No row may be all -inf.
        causal: whether row i reads keys 0 to i only; on the CPU, without a mask.
    """
    if takes_flash(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        q, k, v = _of_one_head_dim(q_AID, k_AWD, v_AWF)
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=softmax_scale)
        return out[:, 0, :, : v_AWF.shape[2]], lse[:, 0]
    s_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW)
    lse_AI = s_AIW.logsumexp(-1)
    p_AIW = s_AIW.sub_(lse_AI[..., None]).exp_()
    return torch.bmm(p_AIW, v_AWF), lse_AI


def attend_backward(
    dout_AIF: Tensor,
    q_AID: Tensor,
    k_AWD: Tensor,
    v_AWF: Tensor,
    out_AIF: Tensor,
    lse_AI: Tensor,
    *,
    softmax_scale: float,
    mask_AIW: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from an output and an LSE that may be those of several parts.

    A row whose LSE is +inf has probabilities of 0: it gets no gradient and gives none.
    """
    if takes_flash(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        tensors = *_of_one_head_dim(dout_AIF, q_AID, k_AWD, v_AWF, out_AIF), lse_AI[:, None]
        gradients = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=softmax_scale)
        dq_AID, dk_AWD, dv_AWF = (
            dx[:, 0, :, : x.shape[2]]
            for dx, x in zip(gradients, (q_AID, k_AWD, v_AWF), strict=True)
        )
        return dq_AID, dk_AWD, dv_AWF
    p_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW).sub_(lse_AI[..., None]).exp_()
    dv_AWF = torch.bmm(p_AIW.transpose(1, 2), dout_AIF)
    ds_AIW = torch.bmm(dout_AIF, v_AWF.transpose(1, 2))
    ds_AIW.sub_((dout_AIF * out_AIF).sum(-1, keepdim=True)).mul_(p_AIW).mul_(softmax_scale)
    return torch.bmm(ds_AIW, k_AWD), torch.bmm(ds_AIW.transpose(1, 2), q_AID), dv_AWF


def _of_one_head_dim(*xs_AID: Tensor) -> list[Tensor]:
    """[A, 1, I, D] of tensors [A, I, D], zeros past narrower ones' ends: the kernel knows one D."""
    widest = max(x.shape[2] for x in xs_AID)
    return [
        (x if x.shape[2] == widest else pad(x, (0, widest - x.shape[2])))[:, None] for x in xs_AID
    ]


def _scores(q_AID: Tensor, k_AWD: Tensor, softmax_scale: float, mask_AIW: Tensor | None) -> Tensor:
    s_AIW = torch.bmm(q_AID, k_AWD.transpose(1, 2)).mul_(softmax_scale)
    return s_AIW if mask_AIW is None else s_AIW.add_(mask_AIW)
