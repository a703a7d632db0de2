# SPDX-License-Identifier: Apache-2.0
"""Megatron's decoder spec with the core attention replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.compat import default_layer_spec
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention


def sparse_balance_layer_spec(options: AttentionOptions) -> Callable[[Any, int | None], Any]:
    """A spec function ``(transformer_config, vp_stage) -> ModuleSpec or block submodules``."""

    def spec(transformer_config: Any, vp_stage: int | None = None) -> Any:
        return replace_core_attention(default_layer_spec(transformer_config, vp_stage), options)

    return spec


def replace_core_attention(spec: Any, options: AttentionOptions) -> Any:
    """A copy of ``spec`` whose self-attention layers use :class:`BudgetedCoreAttention`.

    Args:
        spec: a ``ModuleSpec`` of a transformer layer, or ``TransformerBlockSubmodules``.

    Raises:
        ConfigError: if a layer has no replaceable core attention.
    """
    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        self_attention = getattr(layer.submodules, "self_attention", None)
        submodules = getattr(self_attention, "submodules", None)
        if submodules is None or not hasattr(submodules, "core_attention"):
            raise ConfigError(
                f"--sparse-balance: {layer.module.__name__} has no core attention to replace; "
                "use plain or grouped-query attention layers"
            )
        submodules.core_attention = ModuleSpec(
            module=BudgetedCoreAttention, params={"options": options}
        )
    return spec
