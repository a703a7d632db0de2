# SPDX-License-Identifier: Apache-2.0
"""Watches the collectives of layers of experts.

A layer of experts gathers how many tokens each rank of its group sends, dispatches them, and
combines what the experts made of them. Backward repeats the last two the other way round. Whoever
comes first to one of them waits for the others there.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from sparsebalance_megatron.megatron.timing import MicroBatchRecorder

_COLLECTIVES = ("preprocess", "token_dispatch", "token_combine")
"""Methods of token dispatchers that hold collectives. Not every dispatcher has the first."""
COLLECTIVES_PER_LAYER = len(_COLLECTIVES)
_WATCHED = "_sparse_balance_watched"


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
