# SPDX-License-Identifier: Apache-2.0
"""Whole documents by FlashAttention-4, of the layouts that :mod:`.dense` takes, in one call.

It is imported where it is first called. Its two functions take an output and an LSE from outside in
their backward pass, so that parts add up; torch's template of flex attention calls them too, by the
names that are checked here. Sums of dq have any order, unless torch's deterministic algorithms are
asked for. A document's last tile also multiplies the first values of the next document by 0: a NaN
there reaches the document before it (Dao-AILab/flash-attention, issue 2374).
"""

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import aligned
from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.flash_attention import head_obstacle, not_installed

_COMMON = {"softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k"}
_COMMON |= {"max_seqlen_q", "max_seqlen_k"}
_ARGUMENTS = {
    "_flash_attn_fwd": _COMMON | {"return_lse"},
    "_flash_attn_bwd": _COMMON | {"deterministic"},
}
"""What is given by name."""


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Attend within documents; see :class:`.contract.Kernel`."""
    out_THF, lse_HT, *_ = interface()._flash_attn_fwd(
        *map(aligned, given.qkv), return_lse=True, **_of_documents(given)
    )
    return out_THF, lse_HT.T


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    dq_THD, dk_TGD, dv_TGF = interface()._flash_attn_bwd(
        *map(aligned, (*saved.qkv, saved.out_THF, dout_THF)),
        saved.lse_TH.T.contiguous(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_of_documents(saved),
    )
    return dq_THD, dk_TGD, dv_TGF


def obstacle(q_THD: Tensor, v_TGF: Tensor, layout: PackedLayout) -> str | None:
    """Say why FlashAttention-4 does not serve, and the remedy; None where it serves. Nothing is
    imported before the rest is known to serve."""
    if q_THD.device.type != "cuda":
        return f"needs CUDA, and q lies on {q_THD.device}"
    if q_THD.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {q_THD.dtype}"
    if absent := not_installed():
        return absent
    heads, head_dims = (q_THD.shape[1], v_TGF.shape[1]), (q_THD.shape[2], v_TGF.shape[2])
    capability = torch.cuda.get_device_capability(q_THD.device)
    return head_obstacle(capability, heads, head_dims) or missing()


@cache
def missing() -> str | None:
    """Say what the installed FlashAttention-4 lacks of what is called here, and the remedy."""
    try:
        functions = interface()
    # It imports a compiler, which fails in ways of its own.
    except Exception as error:
        return f"cannot import flash-attn-4 ({type(error).__name__}: {error}): install it anew"
    for name, given in _ARGUMENTS.items():
        function = getattr(functions, name, None)
        known = set() if function is None else signature(function).parameters.keys()
        if lacking := sorted(given - known):
            return f"needs {name} to take {', '.join(lacking)}: install another flash-attn-4"
    return None


def interface() -> Any:
    """The module of FlashAttention-4 that has both functions."""
    from flash_attn.cute import interface

    return interface


def _of_documents(given: Inputs) -> dict[str, Any]:
    """What both functions take by name besides tensors of tokens."""
    queries, keys = given.selection.query_layout, given.selection.kv_layout
    return {
        "cu_seqlens_q": queries.bounds_S1,
        "cu_seqlens_k": keys.bounds_S1,
        "max_seqlen_q": int(queries.grid.tokens_S.max()),
        "max_seqlen_k": int(keys.grid.tokens_S.max()),
        "causal": keys is queries,
        "softmax_scale": given.softmax_scale,
    }
