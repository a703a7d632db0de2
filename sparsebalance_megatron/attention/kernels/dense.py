# SPDX-License-Identifier: Apache-2.0
"""Whole documents: every query reads all tokens of its document up to itself, and no lists.

On CUDA one call of torch's flash kernels serves all documents, on the CPU one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, starmap

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels import varlen
from sparsebalance_megatron.attention.kernels.contract import Saved, wide_dtype
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    takes_flash,
)
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend within documents; see :class:`.contract.Kernel`."""
    layout = selection.query_layout
    if not takes_flash(q_THD.device):
        out_THF, lse_HT = varlen.attend(q_THD, k_TGD, v_TGF, _on_device(layout, softmax_scale))
        return out_THF, lse_HT.T
    q, k, v = (x.to(wide_dtype(x.dtype)) for x in (q_THD, k_TGD, v_TGF))
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
    attend_to_documents(_documents(layout), (q, k, v), (out, lse), softmax_scale)
    return out.to(q_THD.dtype), lse


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; see :class:`.contract.Kernel`."""
    layout, scale = saved.selection.query_layout, saved.softmax_scale
    inputs = dout_THF, saved.q_THD, saved.k_TGD, saved.v_TGF, saved.out_THF
    if not takes_flash(dout_THF.device):
        return varlen.attend_backward(*inputs, saved.lse_TH.T, _on_device(layout, scale))
    wide = [x.to(wide_dtype(x.dtype)) for x in inputs]
    gradients = [torch.empty_like(x) for x in wide[1:4]]
    add_gradients_of_documents(_documents(layout), (*wide, saved.lse_TH), gradients, scale)
    dq, dk, dv = (x.to(dout_THF.dtype) for x in gradients)
    return dq, dk, dv


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Say what torch's kernels do not serve on CUDA."""
    if takes_flash(q_THD.device):
        return None
    if selection.query_layout.documents > varlen.MOST_DOCUMENTS:
        return f"serves {varlen.MOST_DOCUMENTS} documents, not {selection.query_layout.documents}"
    return varlen.obstacle(q_THD.device, q_THD.dtype, max(q_THD.shape[2], v_TGF.shape[2]))


def attend_to_documents(
    documents: Sequence[slice],
    qkv: Sequence[Tensor],
    results: tuple[Tensor, Tensor],
    softmax_scale: float,
) -> None:
    """Write the tokens of some documents into out_THF and lse_TH, on the CPU."""
    for tokens in documents:
        tiles = _as_tiles(tokens, *qkv)
        found = attend(*tiles, softmax_scale=softmax_scale, causal=True)
        for whole_TH, each in zip(results, found, strict=True):
            whole_TH[tokens] = each.transpose(0, 1)


def add_gradients_of_documents(
    documents: Sequence[slice],
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor],
    softmax_scale: float,
) -> None:
    """Write the tokens of some documents into dq_THD, dk_TGD and dv_TGF, on the CPU.

    ``saved`` is dout_THF, q_THD, k_TGD, v_TGF, out_THF and lse_TH.
    """
    for tokens in documents:
        tiles = _as_tiles(tokens, *saved)
        found = attend_backward(*tiles, softmax_scale=softmax_scale, causal=True)
        for whole, per_head in zip(gradients, found, strict=True):
            per_whole_head = per_head.unflatten(0, (whole.shape[1], -1)).sum(1)
            whole[tokens] = per_whole_head.transpose(0, 1)


def _as_tiles(tokens: slice, *xs_T: Tensor) -> list[Tensor]:
    """Some tokens of tensors [T, H or G, ...] as [H, tokens, ...]: a tile for each query head."""
    heads = max(x.shape[1] for x in xs_T)
    return [
        x[tokens].transpose(0, 1).repeat_interleave(heads // x.shape[1], 0, output_size=heads)
        for x in xs_T
    ]


def _documents(layout: PackedLayout) -> list[slice]:
    return list(starmap(slice, pairwise(layout.cu_seqlens)))


def _on_device(layout: PackedLayout, softmax_scale: float) -> varlen.Documents:
    longest = int(layout.grid.tokens_S.max())
    return varlen.Documents(
        bounds_S1=layout.bounds_S1, longest_tokens=longest, softmax_scale=softmax_scale
    )
