# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention with a dense peer: torch's fused attention, document by document.

Imports Megatron. Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head
dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    BudgetedCoreAttention,
    sparse_balance_layer_spec,
)

FUSED = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
"""Without the unfused one: where none of these serves, torch raises instead of being slow."""


def dense_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Sequence[int], softmax_scale: float
) -> Tensor:
    """Causal attention within each document; [T, H * D].

    Raises:
        RuntimeError: if no fused kernel serves these tensors.
    """
    outputs = []
    for begin, end in pairwise(cu_seqlens):
        q_1HTD, k_1GTD, v_1GTD = (x[begin:end].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        with sdpa_kernel(list(FUSED)):
            out_1HTD = scaled_dot_product_attention(
                q_1HTD, k_1GTD, v_1GTD, is_causal=True, scale=softmax_scale, enable_gqa=True
            )
        outputs.append(out_1HTD[0].transpose(0, 1).flatten(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class PeerAttention(BudgetedCoreAttention):
    """Core attention that is dense in the steps of the dense variant.

    Args:
        is_dense: whether a step, as the micro-batch's context names it, is one of these.
    """

    def __init__(self, *arguments: Any, is_dense: Callable[[int], bool], **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._is_dense = is_dense

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *arguments: Any,
        **keywords: Any,
    ) -> Tensor:
        """As the parent; [T, H * D], or [T, 1, H * D] where ranks may share rows."""
        context = keywords["packed_seq_params"].micro_batch
        if self._is_dense(context.step):
            cu_seqlens = context.layout.cu_seqlens
            if context.sequence is None:
                return dense_attention(query, key, value, cu_seqlens, self._softmax_scale)
            q_THD, k_TGD, v_TGD = (x[:, 0] for x in (query, key, value))
            attend = partial(
                dense_attention, cu_seqlens=cu_seqlens, softmax_scale=self._softmax_scale
            )
            heads = context.travelling(context.layout.tokens)
            return heads.attend((q_THD, k_TGD, v_TGD), attend).flatten(1)[:, None]
        return super().forward(query, key, value, *arguments, **keywords)


def peer_layer_spec(
    options: AttentionOptions, is_dense: Callable[[int], bool]
) -> Callable[[Any, int | None], Any]:
    """The plugin's spec function with :class:`PeerAttention` in every layer."""
    plugin_spec = sparse_balance_layer_spec(options)

    def spec(transformer_config: Any, vp_stage: int | None = None) -> Any:
        layers = plugin_spec(transformer_config, vp_stage)
        for layer in getattr(layers, "layer_specs", None) or [layers]:
            layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
                module=PeerAttention, params={"options": options, "is_dense": is_dense}
            )
        return layers

    return spec
