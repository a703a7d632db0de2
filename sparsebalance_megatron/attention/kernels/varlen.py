# SPDX-License-Identifier: Apache-2.0
"""Causal attention within documents by the FlashAttention kernels inside torch, on CUDA.

Boundaries of documents lie on the device. The kernels write nothing outside of documents: rows
there hold whatever was in memory, which may be NaN.

Shape legend: W the widest head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_DOCUMENTS = 65_535
"""A launch numbers its documents in a dimension of its grid that is no larger."""
_ALIGNED_BYTES = 16
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


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Boundaries of documents, S + 1 int32 on the device, and the longest in tokens on the host."""

    bounds_S1: Tensor
    longest_tokens: int
    softmax_scale: float

    def arguments(self) -> dict[str, Any]:
        """What both operations take by name."""
        return {
            **dict.fromkeys(("cum_seq_q", "cum_seq_k"), self.bounds_S1),
            **dict.fromkeys(("max_q", "max_k"), self.longest_tokens),
            "dropout_p": 0.0,
            "is_causal": True,
            "scale": self.softmax_scale,
        }


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, documents: Documents
) -> tuple[Tensor, Tensor]:
    """out_THF, and the natural log-sum-exp lse_HT of the scaled scores in float32."""
    q, k, v = _fitting(q_THD, k_TGD, v_TGF)
    out_THW, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        query=q, key=k, value=v, return_debug_mask=False, **documents.arguments()
    )
    return out_THW[..., : v_TGF.shape[2]], lse_HT


def attend_backward(
    dout_THF: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    out_THF: Tensor,
    lse_HT: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the output and the log-sum-exp."""
    dout, q, k, v, out = _fitting(dout_THF, q_THD, k_TGD, v_TGF, out_THF)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out=dout,
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse_HT.contiguous(),
        # Read where there is dropout.
        rng_state=q.new_empty(2, dtype=torch.uint64),
        unused=q.new_empty(0),
        **documents.arguments(),
    )
    head_dim = q_THD.shape[2]
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., : v_TGF.shape[2]]


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the kernels do not serve, and the remedy; None where they serve."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        found = "{}.{}".format(*capability)
        return f"needs a GPU of compute capability 8.0 or newer, not {found}; {_REMEDY}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {dtype}; {_REMEDY}"
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


def _fitting(*xs_THD: Tensor) -> list[Tensor]:
    """The tensors at one head dim that the kernels have, zeros behind, aligned as they must be."""
    width = max(x.shape[2] for x in xs_THD)
    width = -(-width // 8) * 8 if width <= _UNEVEN_HEAD_DIM else _MOST_HEAD_DIM
    return [_aligned(x if x.shape[2] == width else pad(x, (0, width - x.shape[2]))) for x in xs_THD]


def _aligned(x_THD: Tensor) -> Tensor:
    """The tensor itself where each of its vectors begins at a multiple of 16 bytes, else a copy."""
    *strides, last = x_THD.stride()
    places = (x_THD.storage_offset(), *strides)
    fits = last == 1 and not any(x * x_THD.element_size() % _ALIGNED_BYTES for x in places)
    return x_THD if fits else x_THD.clone(memory_format=torch.contiguous_format)
