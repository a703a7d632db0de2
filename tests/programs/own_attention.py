# SPDX-License-Identifier: Apache-2.0
"""A training process whose layers have an attention that takes packed sequences, as Transformer
Engine's does: it stands in for that on CPUs. At the end it says how often it ran.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.megatron import cpu

cpu.install()

from megatron.core.transformer.module import MegatronModule  # noqa: E402

from sparsebalance_megatron.megatron import core_attention  # noqa: E402
from sparsebalance_megatron.megatron.compat import default_layer_spec  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

CALLS = []


class OwnAttention(MegatronModule):
    """Causal attention within the documents of plain packed-sequence parameters."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params.qkv_format == "thd"
        parts = []
        for start, end in itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1).flatten(1))
        CALLS.append(len(parts))
        return torch.cat(parts)


def own_layer_spec(*given: Any) -> Any:
    """Megatron's layers with that attention."""
    spec = default_layer_spec(*given)
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        layer.submodules.self_attention.submodules.core_attention = OwnAttention
    return spec


if __name__ == "__main__":
    core_attention.default_layer_spec = own_layer_spec
    main()
    print(f"own attention ran {len(CALLS)} times", flush=True)
