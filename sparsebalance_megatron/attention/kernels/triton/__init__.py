# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for every selection. Triton is imported where they are first run.

Products take the inputs' dtype and accumulate in float32. Results repeat bit by bit. Neither pass
reads the device from the host, and budgets or tokens that change compile nothing.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.kernels.triton.tiles import SHARED_BYTES, capability_of
from sparsebalance_megatron.attention.selection import Selection


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Attend over a selection; see :class:`..contract.Kernel`.

    Raises:
        ValueError: ``softmax_scale`` is not positive.
    """
    selection, softmax_scale = given.selection, given.softmax_scale
    if not softmax_scale > 0.0:
        raise ValueError(
            f"block_sparse_attention: softmax_scale {softmax_scale}: must be positive for "
            'implementation "triton"; negate the queries instead'
        )
    from sparsebalance_megatron.attention.kernels.triton import (
        device_functions,
        query_block_kernel,
        token_kernels,
    )
    from sparsebalance_megatron.attention.kernels.triton.index import readers_of

    q_THD, k_TGD, v_TGF = map(device_functions.with_dense_rows, given.qkv)
    out_THF = q_THD.new_empty(*q_THD.shape[:2], v_TGF.shape[2])
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    tensors = q_THD, k_TGD, v_TGF, None, out_THF, lse_TH, None
    with torch.cuda.device_of(q_THD):
        if selection.by_token:
            readers = readers_of(selection, k_TGD.shape[1])
            token_kernels.launch(selection, readers, tensors, softmax_scale)
        else:
            query_block_kernel.launch(selection, (*tensors, None), softmax_scale)
    return out_THF, lse_TH


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    from sparsebalance_megatron.attention.kernels.triton import (
        device_functions,
        key_block_kernel,
        token_kernels,
    )

    kernels = token_kernels if saved.selection.by_token else key_block_kernel
    inputs = *saved.qkv, dout_THF
    q_THD, k_TGD, v_TGF, dout_THF = map(device_functions.with_dense_rows, inputs)
    with torch.cuda.device_of(dout_THF):
        return kernels.gradients(
            dout_THF,
            replace(
                saved,
                q_THD=q_THD,
                k_TGD=k_TGD,
                v_TGF=v_TGF,
                out_THF=saved.out_THF.contiguous(),
                lse_TH=saved.lse_TH.contiguous(),
            ),
        )


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Say what the kernels do not serve: devices, dtypes, block sizes, head dims, vast lists."""
    block_size = selection.kv_layout.block_size
    head_dim = max(q_THD.shape[2], v_TGF.shape[2])
    other = "tokens" if selection.by_token else "blocks"
    if q_THD.device.type != "cuda" and not is_interpreted():
        return f'needs CUDA, and q lies on {q_THD.device}: use "{other}" or "auto"'
    capability = capability_of(q_THD.device)
    if capability not in SHARED_BYTES:
        known = ", ".join("{}.{}".format(*each) for each in SHARED_BYTES)
        return (
            f"has tile shapes for GPUs of compute capability {known}; this one, "
            f"{torch.cuda.get_device_name(q_THD.device)}, has {capability[0]}.{capability[1]}: "
            f'use "{other}"'
        )
    if q_THD.dtype == torch.bfloat16 and is_interpreted():
        return f'multiplies the bits of bfloat16 as integers in the interpreter: use "{other}"'
    if q_THD.dtype == torch.float64:
        return f'does not compute in float64: use "{other}"'
    if block_size < 16 or block_size & (block_size - 1):
        return f'needs blocks of 16 tokens or more, a power of two, not {block_size}: use "{other}"'
    if head_dim > 256:
        return f'serves head dims up to 256, not {head_dim}: use "{other}"'
    rows, heads, width = selection.indices_QCK.shape
    if rows * heads * width >= 1 << 31:
        return (
            f"numbers the entries of all lists with 31 bits, too few for {rows} rows and {heads} "
            f'heads with lists of {width} places: lower the largest budget, or use "{other}"'
        )
    return None


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)
