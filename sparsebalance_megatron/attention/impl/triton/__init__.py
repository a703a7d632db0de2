# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for selections by query block. Triton is imported where they are first run.

Products take the inputs' dtype and accumulate in float32. Results repeat bit by bit. Neither pass
reads the device from the host, and budgets or tokens that change compile nothing.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernel import obstacle_of_lists
from sparsebalance_megatron.attention.selection import Selection


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by query block; see :class:`...kernel.Kernel`.

    Raises:
        ValueError: ``softmax_scale`` is not positive.
    """
    from sparsebalance_megatron.attention.impl.triton.forward_kernel import forward_attention

    if not softmax_scale > 0.0:
        raise ValueError(
            f"block_sparse_attention: softmax_scale {softmax_scale}: must be positive for "
            'implementation "triton"; negate the queries instead'
        )
    return forward_attention(q_THD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale)


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; see :class:`...kernel.Kernel`."""
    from sparsebalance_megatron.attention.impl.triton.backward_kernels import backward_attention

    return backward_attention(
        dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH, selection, softmax_scale=softmax_scale
    )


def obstacle(q_THD: Tensor, selection: Selection) -> str | None:
    """Say what the kernels do not serve: devices, dtypes, block sizes, head dims."""
    block_size, head_dim = selection.kv_layout.block_size, q_THD.shape[2]
    if selection.by_token:
        return obstacle_of_lists(selection, by_token=False)
    if q_THD.device.type != "cuda" and not _interpreted():
        return f'needs CUDA, and q lies on {q_THD.device}: use "blocks" or "auto"'
    if q_THD.dtype == torch.float64:
        return 'does not compute in float64: use "blocks"'
    if block_size < 16 or block_size & (block_size - 1):
        return f'needs blocks of 16 tokens or more, a power of two, not {block_size}: use "blocks"'
    if head_dim > 256:
        return f'serves head dims up to 256, not {head_dim}: use "blocks"'
    return None


def _interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)
