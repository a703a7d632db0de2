# SPDX-License-Identifier: Apache-2.0
"""Whole documents by torch: every query reads all tokens of its document up to itself, no lists.
Where queries and keys have layouts of their own, those of document i read all keys of document i.

On CUDA one call of the FlashAttention kernels inside torch serves all documents, whose boundaries
lie on the device; on the CPU one call each. The kernels on CUDA write nothing outside of documents:
rows there hold whatever was in memory, which may be NaN.

Shape legend: W the widest head dim.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.device import aligned
from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved, wide_dtype
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    takes_flash,
)
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

_MOST_DOCUMENTS = 65_535
"""A launch numbers its documents in a dimension of its grid that is no larger."""
_MOST_HEAD_DIM = 256
_UNEVEN_HEAD_DIM = 192
"""Some devices have no backward kernel for head dims above, but for the largest."""
_COMMON = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p"),
    *("is_causal", "scale"),
)
_ARGUMENTS = {
    "_flash_attention_forward": {*_COMMON, "return_debug_mask"},
    "_flash_attention_backward": {
        *_COMMON,
        *("grad_out", "out", "logsumexp", "rng_state", "unused"),
    },
}
"""What the calls below give by name."""
_REMEDY = "attend over lists of blocks"


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Attend within documents; see :class:`.contract.Kernel`."""
    selection, softmax_scale = given.selection, given.softmax_scale
    if takes_flash(given.q_THD.device):
        q, k, v = (x.to(wide_dtype(x.dtype)) for x in given.qkv)
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
        causal, heads = _is_causal(selection), q.shape[1]
        for tokens, keys in _documents(selection):
            tiles = *_as_tiles(heads, tokens, q), *_as_tiles(heads, keys, k, v)
            found = attend(*tiles, softmax_scale=softmax_scale, causal=causal)
            out[tokens], lse[tokens] = (each.transpose(0, 1) for each in found)
        return out.to(given.q_THD.dtype), lse
    q_THW, k_TGW, v_TGW = _fitting(*given.qkv)
    out_THW, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        query=q_THW,
        key=k_TGW,
        value=v_TGW,
        return_debug_mask=False,
        **_of_documents(given),
    )
    return out_THW[..., : given.v_TGF.shape[2]], lse_HT.T


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    selection, scale = saved.selection, saved.softmax_scale
    inputs = dout_THF, *saved.qkv, saved.out_THF
    if takes_flash(dout_THF.device):
        dout, q, k, v, out = (x.to(wide_dtype(x.dtype)) for x in inputs)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        causal, heads = _is_causal(selection), q.shape[1]
        for tokens, keys in _documents(selection):
            tiles = (
                *_as_tiles(heads, tokens, dout, q),
                *_as_tiles(heads, keys, k, v),
                *_as_tiles(heads, tokens, out, saved.lse_TH),
            )
            found = attend_backward(*tiles, softmax_scale=scale, causal=causal)
            for whole, per_head, rows in zip(gradients, found, (tokens, keys, keys), strict=True):
                per_whole_head = per_head.unflatten(0, (whole.shape[1], -1)).sum(1)
                whole[rows] = per_whole_head.transpose(0, 1)
        dq, dk, dv = (x.to(dout_THF.dtype) for x in gradients)
        return dq, dk, dv
    dout_THW, q_THW, k_TGW, v_TGW, out_THW = _fitting(*inputs)
    gradients = torch.ops.aten._flash_attention_backward(
        grad_out=dout_THW,
        query=q_THW,
        key=k_TGW,
        value=v_TGW,
        out=out_THW,
        logsumexp=saved.lse_TH.T.contiguous(),
        # Read where there is dropout.
        rng_state=q_THW.new_empty(2, dtype=torch.uint64),
        unused=q_THW.new_empty(0),
        **_of_documents(saved),
    )
    dq, dk, dv = (dx[..., : x.shape[2]] for dx, x in zip(gradients, inputs[1:4], strict=True))
    return dq, dk, dv


def obstacle(q_THD: Tensor, v_TGF: Tensor, layout: PackedLayout) -> str | None:
    """Say what torch's kernels do not serve on CUDA, and the remedy; None where they serve."""
    if takes_flash(q_THD.device):
        return None
    if layout.documents > _MOST_DOCUMENTS:
        return f"serves {_MOST_DOCUMENTS} documents, not {layout.documents}"
    capability = torch.cuda.get_device_capability(q_THD.device)
    if capability < (8, 0):
        found = "{}.{}".format(*capability)
        return f"needs a GPU of compute capability 8.0 or newer, not {found}; {_REMEDY}"
    if q_THD.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {q_THD.dtype}; {_REMEDY}"
    head_dim = max(q_THD.shape[2], v_TGF.shape[2])
    if head_dim > _MOST_HEAD_DIM:
        return f"serves head dims up to {_MOST_HEAD_DIM}, not {head_dim}; {_REMEDY}"
    return missing_in_torch()


@cache
def missing_in_torch() -> str | None:
    """Say what torch's operations lack of what is called here, and the remedy."""
    if not torch.backends.cuda.is_flash_attention_available():
        return f"needs a torch built with FlashAttention, {torch.__version__} is not; {_REMEDY}"
    for name, given in _ARGUMENTS.items():
        operation: Any = getattr(torch.ops.aten, name, None)
        known = set()
        if operation is not None:
            known = {argument.name for argument in operation.default._schema.arguments}
        if missing := sorted(given - known):
            return (
                f"needs aten::{name} to take {', '.join(missing)}, which it does not in torch "
                f"{torch.__version__}; install torch 2.8 to 2.14, or {_REMEDY}"
            )
    return None


def _is_causal(selection: Selection) -> bool:
    return selection.kv_layout is selection.query_layout


def _documents(selection: Selection) -> Iterator[tuple[slice, slice]]:
    """Tokens of the queries and of the keys of every document."""
    layouts = selection.query_layout, selection.kv_layout
    yield from zip(*(starmap(slice, pairwise(x.cu_seqlens)) for x in layouts), strict=True)


def _as_tiles(heads: int, tokens: slice, *xs_T: Tensor) -> list[Tensor]:
    """Some tokens of tensors [T, H or G, ...] as [H, tokens, ...]: a tile for each query head."""
    return [
        x[tokens].transpose(0, 1).repeat_interleave(heads // x.shape[1], 0, output_size=heads)
        for x in xs_T
    ]


def _of_documents(given: Inputs) -> dict[str, Any]:
    """What both operations on CUDA take by name besides tensors of tokens."""
    queries, keys = given.selection.query_layout, given.selection.kv_layout
    return {
        "cum_seq_q": queries.bounds_S1,
        "cum_seq_k": keys.bounds_S1,
        "max_q": int(queries.grid.tokens_S.max()),
        "max_k": int(keys.grid.tokens_S.max()),
        "dropout_p": 0.0,
        "is_causal": _is_causal(given.selection),
        "scale": given.softmax_scale,
    }


def _fitting(*xs_THD: Tensor) -> list[Tensor]:
    """The tensors at one head dim that the kernels have, zeros behind, aligned as they must be."""
    width = max(x.shape[2] for x in xs_THD)
    width = -(-width // 8) * 8 if width <= _UNEVEN_HEAD_DIM else _MOST_HEAD_DIM
    return [aligned(x if x.shape[2] == width else pad(x, (0, width - x.shape[2]))) for x in xs_THD]
