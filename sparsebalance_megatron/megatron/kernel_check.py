# SPDX-License-Identifier: Apache-2.0
"""Refuses to train on kernels that are wrong on this device.

Compilers and assemblers have produced kernels whose gradients were wrong without an error.
"""

from dataclasses import replace

import torch

from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.self_check import check_attention
from sparsebalance_megatron.config import SparseBalanceConfig, flag_with
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.flash_attention import head_obstacle, not_installed
from sparsebalance_megatron.layer_budgets import has_dense_layers
from sparsebalance_megatron.supported import installed_version

_LARGEST_BLOCK_ON_CPU = 128
"""Tokens, whose check takes a second; implementations on CPUs do not depend on the block size."""
_NAMES = {
    "fa4": "FlashAttention-4",
    "model": "the model's own attention",
    "torch": "torch's FlashAttention",
    "lists": "lists",
}


class KernelCheckError(ValueError):
    """A kernel is wrong on this device, or cannot run."""


def check_kernels(
    config: SparseBalanceConfig,
    shape: ModelShape,
    dtype: str,
    device: torch.device,
    *,
    takes_packed_sequences: bool = False,
) -> str:
    """Check the kernels that this run's layers will use; gives a line for the log.

    The model's own attention, which ``takes_packed_sequences`` or not, is not checked. Every
    failure becomes a :class:`KernelCheckError`, so that other ranks can be told.
    """
    heads, head_dims = shape.rank_heads, (shape.head_dim, shape.value_dim)
    on = f"cpu, torch {torch.__version__}"
    if device.type == "cpu":
        config = replace(config, block_size=min(config.block_size, _LARGEST_BLOCK_ON_CPU))
    else:
        triton = installed_version("triton") or "not installed"
        on = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Triton {triton}"
    # Dense layers, and slices of dense documents, have lists by block of queries and KV head.
    has_dense = has_dense_layers(config.layer_budgets) or (
        config.dense_up_to_tokens and config.attention != "tokens"
    )
    dense = {"previous-block"} if has_dense else set()
    for selection in sorted({config.selection} | dense):
        try:
            chosen = replace(config, selection=selection)
            verdict = check_attention(chosen, heads, head_dims, getattr(torch, dtype), device)
            problems = verdict.problems()
        # Kernels fail in the compilers' own ways, and every one of them is an answer here.
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            others = {"triton", "tokens" if selector_named(selection).by_token else "blocks"}
            names = " or ".join(sorted(others - {config.attention}))
            remedy = (
                f"{flag_with('attention', names)}, and {flag_with('router', 'torch')} where the "
                "selection has that choice, or with another ptxas (TRITON_PTXAS_PATH)"
            )
            if all(problem.startswith("dense") for problem in problems):
                remedy = flag_with("dense_attention", "torch")
            raise KernelCheckError(
                f"kernel check of {selection} on {on}, {dtype}, head dims {shape.head_dim} and "
                f"{shape.value_dim}: {'; '.join(problems)}; train with {remedy}"
            )
    name = verdict.dense_kernel
    if takes_packed_sequences and config.model_may_attend and name != "fa4":
        name = "model"
    line = f"kernels agree with the reference ({on}); dense documents run on {_NAMES[name]}"
    if name == "torch" and config.dense_attention == "auto" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if missing := not_installed() or head_obstacle(capability, heads, head_dims):
            line += f"; FlashAttention-4 {missing}"
    return line
