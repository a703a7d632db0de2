# SPDX-License-Identifier: Apache-2.0
"""Sizes of public models, from the config.json that their makers publish on huggingface.co."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.view.simulate.lengths import WorkloadError


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """Sizes of a model. ``shape`` is of one tensor-parallel rank that has all of it."""

    name: str
    layers: int
    shape: ModelShape
    tied_embeddings: bool


def model_preset(
    name: str,
    *,
    layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    tied_embeddings: bool,
) -> ModelPreset:
    """A model with a gated MLP, as all of these have."""
    shape = ModelShape(
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        gated_linear_unit=True,
        tensor_parallel_size=1,
    )
    return ModelPreset(name=name, layers=layers, shape=shape, tied_embeddings=tied_embeddings)


_COLUMNS = (
    *("layers", "hidden_size", "ffn_hidden_size", "heads", "kv_heads", "head_dim", "vocab_size"),
)
_SIZES = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-3b": (36, 2048, 11008, 16, 2, 128, 151936),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-14b": (48, 5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 128, 152064),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8, 128, 152064),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, 128256),
}

_TIED = frozenset(
    {
        *("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"),
        *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"),
    }
)
"""Embedding and output are one matrix."""

MODELS: Mapping[str, ModelPreset] = {
    name: model_preset(
        name, **dict(zip(_COLUMNS, sizes, strict=True)), tied_embeddings=name in _TIED
    )
    for name, sizes in _SIZES.items()
}


def preset(name: str) -> ModelPreset:
    """A public model by name.

    Raises:
        WorkloadError: the name is unknown.
    """
    if name not in MODELS:
        raise WorkloadError(f"model {name!r} is not one of {', '.join(MODELS)}")
    return MODELS[name]
