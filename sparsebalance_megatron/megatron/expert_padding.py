# SPDX-License-Identifier: Apache-2.0
"""Leaves padding out of what routers of experts count: expert bias and balancing losses.

Padding is computed like tokens, for sequence parallelism, fp8 and fp4, and ranks that share a
sequence. Megatron's layers take a mask of it and hand it to their routers.

Shape legend: T tokens that a rank computes, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

_MASKED = "_sparse_balance_masked"


def leave_out_padding(model: Any) -> None:
    """Have a model chunk's routers count no padding; idempotent.

    Megatron's quantile balancing takes no mask and counts all.
    """
    if getattr(model, _MASKED, False):
        return
    for block in [each for each in model.modules() if isinstance(each, TransformerBlock)]:
        routers = [each for each in block.modules() if isinstance(each, TopKRouter)]
        takes_mask = "padding_mask" in inspect.signature(block.forward).parameters
        balances = {getattr(each, "routing_type", None) for each in routers}
        if routers and takes_mask and "quantile_balancing" not in balances:
            block.register_forward_pre_hook(_hand_over_mask, with_kwargs=True)
            for router in routers:
                router._apply_expert_bias = _masking(router._apply_expert_bias)
    setattr(model, _MASKED, True)


def _hand_over_mask(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    micro_batch = getattr(kwargs.get("packed_seq_params"), "micro_batch", None)
    padding_T = None if micro_batch is None else micro_batch.padding_T()
    if padding_T is None or kwargs.get("padding_mask") is not None:
        return args, kwargs
    if block.config.sequence_parallel:
        padding_T = scatter_to_sequence_parallel_region(padding_T)
    return args, {**kwargs, "padding_mask": padding_T[None]}


def _masking(count: Callable[..., None]) -> Callable[..., None]:
    """A router's counting of tokens by expert, without padding.

    megatron-core 0.19.2 cannot mask [T, E] by [T] itself.
    """

    def count_tokens(routing_map_TE: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            routing_map_TE = routing_map_TE & ~padding_mask.reshape(-1, 1)
        count(routing_map_TE)

    return count_tokens
