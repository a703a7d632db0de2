# SPDX-License-Identifier: Apache-2.0
"""Layers of experts: watches their collectives, and leaves padding out of what routers count.

A layer of experts gathers how many tokens each rank of its group sends, dispatches them, and
combines what the experts made of them. Backward repeats the last two the other way round. Whoever
comes first to one of them waits for the others there.

Shape legend: T tokens that a rank computes, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from sparsebalance_megatron.megatron.timing import MicroBatchRecorder

_COLLECTIVES = ("preprocess", "token_dispatch", "token_combine")
"""Methods of token dispatchers that hold collectives. Not every dispatcher has the first."""
COLLECTIVES_PER_LAYER = len(_COLLECTIVES)
_WATCHED, _MASKED = "_sparse_balance_watched", "_sparse_balance_masked"


def watch_expert_collectives(model: Any, recorder: MicroBatchRecorder) -> None:
    """Have a recorder hear of the collectives of a model chunk's expert layers; idempotent.

    The i-th expert layer's collectives have the numbers from i x :data:`COLLECTIVES_PER_LAYER`.
    Backward is heard through hooks of the autograd graph.
    """
    if getattr(model, _WATCHED, None) is recorder:
        return
    layers = [module for module in model.modules() if isinstance(module, BaseMoELayer)]
    for layer, module in enumerate(layers):
        dispatcher = module.token_dispatcher
        for index, name in enumerate(_COLLECTIVES):
            # An earlier run's watch is an attribute of the object and hides the method.
            vars(dispatcher).pop(name, None)
            if (method := getattr(dispatcher, name, None)) is not None:
                number = layer * COLLECTIVES_PER_LAYER + index
                setattr(dispatcher, name, _watched(method, recorder, number))
    setattr(model, _WATCHED, recorder)


def _watched(
    method: Callable[..., Any], recorder: MicroBatchRecorder, number: int
) -> Callable[..., Any]:
    """The method, whose forward and backward the recorder hears of."""

    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        recorder.begin_collective(number)
        result = method(*arguments, **keywords)
        recorder.end_collective(number)
        # A tensor that passes through as it is, in a group of one rank, was exchanged with nobody.
        for node in _nodes(result) - _nodes(arguments):
            node.register_prehook(lambda gradients: recorder.begin_collective(number))
            node.register_hook(lambda inputs, outputs: recorder.end_collective(number))
        return result

    return call


def _nodes(values: Any) -> set[Any]:
    """Nodes of the autograd graph that made the tensors of a tuple or a single tensor."""
    tensors = values if isinstance(values, tuple) else (values,)
    return {value.grad_fn for value in tensors if isinstance(value, Tensor)} - {None}


def leave_out_padding(model: Any) -> None:
    """Have a model chunk's routers count no padding, in expert bias and balancing losses;
    idempotent. Megatron's quantile balancing takes no mask and counts all."""
    if getattr(model, _MASKED, False):
        return
    for block in [each for each in model.modules() if isinstance(each, TransformerBlock)]:
        routers = [each for each in block.modules() if isinstance(each, TopKRouter)]
        if routers and all(each.routing_type != "quantile_balancing" for each in routers):
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
