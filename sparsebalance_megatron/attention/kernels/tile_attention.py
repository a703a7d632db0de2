# SPDX-License-Identifier: Apache-2.0
"""Dense attention of tiles, forward and backward: what the gathering implementations are made of.

On the CPU torch's own flash kernel computes, the one behind ``scaled_dot_product_attention``: it
gives the LSE, and its backward pass takes an output and an LSE from outside, so that parts add up.
It cuts tiles by their shape, hence a row's bits do not follow from the rows beside it. Elsewhere
torch's products compute.

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
    """Whether reading lists and their lengths stops nobody."""
    return device.type == "cpu"


def tiles_at_once(rows: int, keys: int, device: torch.device) -> int:
    """How many tiles of ``rows`` rows and ``keys`` keys go into one call, at least 1."""
    threads = torch.get_num_threads() if host_may_read(device) else 64
    return max(1, threads * _SCORES_AT_ONCE // (rows * keys))


def later_keys_IW(
    queries: int, keys: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The causal mask of a block that attends to itself: -inf at keys after the query, else 0.

    Rows are queries, each with its ``heads`` side by side.
    """
    future = torch.full((queries, keys), -torch.inf, dtype=dtype, device=device).triu_(1)
    return future.repeat_interleave(heads, 0, output_size=queries * heads)


def attend(
    q_AID: Tensor,
    k_AWD: Tensor,
    v_AWD: Tensor,
    *,
    softmax_scale: float,
    mask_AIW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from every row of a tile to all of its keys.

    Args:
        q_AID, k_AWD, v_AWD: one dtype, float32 or float64.
        softmax_scale: factor on q . k.
        mask_AIW: added to the scaled scores; sizes of 1 are broadcast. Off the CPU a row may be all
            -inf: its output is 0, its LSE -inf.

    Returns:
        out_AID and the natural log-sum-exp lse_AI.
    """
    if host_may_read(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        out_A1ID, lse_A1I = _flash(
            q_AID[:, None],
            k_AWD[:, None],
            v_AWD[:, None],
            attn_mask=mask,
            scale=softmax_scale,
        )
        return out_A1ID[:, 0], lse_A1I[:, 0]
    s_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW)
    lse_AI = s_AIW.logsumexp(-1)
    p_AIW = s_AIW.sub_(_finite(lse_AI)).exp_()
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from an output and an LSE that may be those of several parts.

    A row whose LSE is +inf has probabilities of 0: it gets no gradient and gives none.
    """
    if host_may_read(q_AID.device):
        mask = None if mask_AIW is None else mask_AIW[:, None]
        gradients = _flash_backward(
            dout_AID[:, None],
            q_AID[:, None],
            k_AWD[:, None],
            v_AWD[:, None],
            out_AID[:, None],
            lse_AI[:, None],
            0.0,
            False,
            attn_mask=mask,
            scale=softmax_scale,
        )
        dq_AID, dk_AWD, dv_AWD = (x[:, 0] for x in gradients)
        return dq_AID, dk_AWD, dv_AWD
    p_AIW = _scores(q_AID, k_AWD, softmax_scale, mask_AIW).sub_(lse_AI[..., None]).exp_()
    dv_AWD = torch.bmm(p_AIW.transpose(1, 2), dout_AID)
    ds_AIW = torch.bmm(dout_AID, v_AWD.transpose(1, 2))
    ds_AIW.sub_((dout_AID * out_AID).sum(-1, keepdim=True)).mul_(p_AIW).mul_(softmax_scale)
    return torch.bmm(ds_AIW, k_AWD), torch.bmm(ds_AIW.transpose(1, 2), q_AID), dv_AWD


def attend_causally(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Dense causal attention of one document, on the CPU only: out_THD and lse_TH."""
    q, k, v = _by_kv_head(q_THD, k_TGD), _repeated(k_TGD, q_THD), _repeated(v_TGD, q_THD)
    out, lse = _flash(q, k, v, is_causal=True, scale=softmax_scale)
    return _by_token(out), _by_token(lse)


def attend_causally_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attend_causally`: dq_THD, dk_TGD and dv_TGD."""
    dout, q, out, lse = (_by_kv_head(x, k_TGD) for x in (dout_THD, q_THD, out_THD, lse_TH))
    k, v = _repeated(k_TGD, q_THD), _repeated(v_TGD, q_THD)
    dq, dk, dv = _flash_backward(dout, q, k, v, out, lse, 0.0, True, scale=softmax_scale)
    return _by_token(dq), dk.sum(1).transpose(0, 1), dv.sum(1).transpose(0, 1)


def _by_kv_head(x_TH: Tensor, k_TGD: Tensor) -> Tensor:
    """[T, H, ...] to [G, H / G, T, ...]."""
    x = x_TH.unflatten(1, (k_TGD.shape[1], -1))
    return x.movedim(0, 2)


def _by_token(x: Tensor) -> Tensor:
    """[G, H / G, T, ...] to [T, H, ...]."""
    return x.movedim(2, 0).flatten(1, 2)


def _repeated(k_TGD: Tensor, q_THD: Tensor) -> Tensor:
    """[T, G, D] to a view [G, H / G, T, D]."""
    group = q_THD.shape[1] // k_TGD.shape[1]
    return k_TGD.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _scores(q_AID: Tensor, k_AWD: Tensor, softmax_scale: float, mask_AIW: Tensor | None) -> Tensor:
    s_AIW = torch.bmm(q_AID, k_AWD.transpose(1, 2)).mul_(softmax_scale)
    return s_AIW if mask_AIW is None else s_AIW.add_(mask_AIW)


def _finite(lse_AI: Tensor) -> Tensor:
    """[A, I, 1] without -inf: scores of -inf less that are probabilities of 0."""
    return lse_AI.clamp(min=torch.finfo(lse_AI.dtype).min)[..., None]
