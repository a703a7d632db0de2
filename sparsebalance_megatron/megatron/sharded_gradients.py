# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters that data-parallel ranks share in shards (``--use-torch-fsdp2``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import Tensor


def divide_by_tokens(model: Sequence[Any], tokens: Tensor | None) -> None:
    """Divide sharded gradients by the tokens of a step, which Megatron leaves out.

    With per-token loss, ``finalize_model_grads`` asks every model chunk to divide. A chunk with
    FSDP2 does nothing then (megatron-core 0.19.2), so that gradients are sums over tokens, and
    their mean over ranks. Chunks of a Megatron that divides are left alone.

    Args:
        model: chunks, after ``finalize_model_grads``.
        tokens: what that function was given, and has added up over ranks; None without per-token
            loss.
    """
    for chunk in model:
        if tokens is None or not _leaves_gradients(chunk):
            continue
        scale = chunk.process_group.size() / tokens.clamp(min=1)
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(scale)


def _leaves_gradients(chunk: Any) -> bool:
    return (
        isinstance(chunk, TorchFullyShardedDataParallel)
        and type(chunk).scale_gradients is _BaseDataParallel.scale_gradients
    )
