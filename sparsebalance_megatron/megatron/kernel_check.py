# SPDX-License-Identifier: Apache-2.0
"""Refuses to train on kernels that are wrong on this device.

Compilers and assemblers have produced kernels whose gradients were wrong without an error.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsebalance_megatron.attention.select import selector_named
from sparsebalance_megatron.attention.self_check import check_attention
from sparsebalance_megatron.config import SparseBalanceConfig, flag_with
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.layer_budgets import has_dense_layers
from sparsebalance_megatron.supported import installed_version

_LARGEST_BLOCK_ON_CPU = 128
"""Tokens, whose check takes a second; implementations on CPUs do not depend on the block size."""


class KernelCheckError(ValueError):
    """A kernel is wrong on this device, or cannot run."""


def check_kernels(
    config: SparseBalanceConfig, shape: ModelShape, dtype: str, device: torch.device
) -> str:
    """Check the kernels that this run's layers will use; gives a line for the log.

    Every failure becomes a :class:`KernelCheckError`, so that other ranks can be told.
    """
    ranks = shape.tensor_parallel_size
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
            problems = check_attention(
                replace(config, selection=selection),
                heads=(shape.num_attention_heads // ranks, max(1, shape.num_query_groups // ranks)),
                head_dims=(shape.head_dim, shape.value_dim),
                dtype=getattr(torch, dtype),
                device=device,
            ).problems()
        # Kernels fail in the compilers' own ways, and every one of them is an answer here.
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            others = {"triton", "tokens" if selector_named(selection).by_token else "blocks"}
            names = " or ".join(sorted(others - {config.attention}))
            raise KernelCheckError(
                f"kernel check of {selection} on {on}, {dtype}, head dims {shape.head_dim} and "
                f"{shape.value_dim}: {'; '.join(problems)}; train with "
                f"{flag_with('attention', names)}, and {flag_with('router', 'torch')} where the "
                "selection has that choice, or with another ptxas (TRITON_PTXAS_PATH)"
            )
    return f"kernels agree with the reference ({on})"
