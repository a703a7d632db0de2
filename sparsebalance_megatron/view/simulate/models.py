# SPDX-License-Identifier: Apache-2.0
"""Sizes of public models, and of dense models that a Hugging Face config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sparsebalance_megatron.config import DEFAULT_COUNTED_DEVICE, DEFAULT_SELECTION, CountedDevice
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import ModelShape, latent_attention_weights
from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.view.simulate.lengths import WorkloadError


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """Sizes of a model with a gated MLP. ``shape`` is of a tensor-parallel rank that has it all.

    ``activated``: the shape has the experts that a token takes, in every layer, and no others.
    """

    name: str
    layers: int
    shape: ModelShape
    tied_embeddings: bool
    activated: bool = False

    def on_ranks(self, tensor_parallel_size: int) -> ModelShape:
        """The shape on so many tensor-parallel ranks.

        Raises:
            WorkloadError: they do not divide the heads.
        """
        heads = self.shape.num_attention_heads
        if heads % tensor_parallel_size:
            raise WorkloadError(
                f"--tp {tensor_parallel_size}: must divide the {heads} heads of {self.name}"
            )
        return replace(self.shape, tensor_parallel_size=tensor_parallel_size)


def counted_cost(
    model: ModelPreset,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    selection: str = DEFAULT_SELECTION,
    device: CountedDevice = DEFAULT_COUNTED_DEVICE,
    gigabytes_per_second: float | None = None,
) -> CostModel:
    """A model's counted operations at a device's rates, and an exchange at a bandwidth.

    Raises:
        WorkloadError: the tensor-parallel ranks do not divide the heads.
    """
    shape = model.on_ranks(tensor_parallel_size)
    cost = CostModel.analytic(shape, block_size, selection=selection, device=device)
    cost = replace(cost, source=f"{model.name}: {cost.source}")
    return cost.with_bandwidth(gigabytes_per_second)


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
"""Name -> layers, then sizes in the order of :class:`.ModelShape`, as published on
huggingface.co."""

_EXPERTS = {
    "deepseek-v2-lite": (27, 2048, (6 + 2) * 1408, 16, 16, 192, 102400),
    "kimi-k2": (61, 7168, (8 + 1) * 2048, 64, 64, 192, 163840),
    "glm-4.5": (92, 5120, (8 + 1) * 1536, 96, 8, 128, 151552),
    "qwen3-30b-a3b": (48, 2048, 8 * 768, 32, 4, 128, 151936),
    "gpt-oss-120b": (36, 2880, 4 * 2880, 64, 8, 64, 201088),
}
"""A model as above, with the routed and shared experts of a token for the MLP. First layers that
are dense, and gpt-oss's sliding windows, are taken for the others."""
_QUERY_RANKS = {"deepseek-v2-lite": None, "kimi-k2": 1536}
"""Rank of the compressed queries of models with multi-latent attention."""

_TIED = frozenset(
    {*("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"), *("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")}
)
"""Embedding and output are one matrix."""


def _preset(name: str, layers: int, *sizes: int, tied_embeddings: bool) -> ModelPreset:
    hidden_size, ffn_hidden_size, heads, kv_heads, head_dim, vocab_size = sizes
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


def _with_experts(name: str) -> ModelPreset:
    preset = _preset(name, *_EXPERTS[name], tied_embeddings=False)
    shape = preset.shape
    if name in _QUERY_RANKS:
        weights = latent_attention_weights(
            hidden_size=shape.hidden_size,
            heads=shape.num_attention_heads,
            q_rank=_QUERY_RANKS[name],
            kv_rank=512,
            qk_dim=128,
            rotary_dim=64,
            value_dim=128,
        )
        shape = replace(shape, value_head_dim=128, attention_weights=weights)
    return replace(preset, shape=shape, activated=True)


MODELS: Mapping[str, ModelPreset] = {
    name: _preset(name, *sizes, tied_embeddings=name in _TIED) for name, sizes in _SIZES.items()
} | {name: _with_experts(name) for name in _EXPERTS}

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**32)]
_Layers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class _HuggingFaceSizes(msgspec.Struct, kw_only=True):
    """Keys of config.json; missing ones have the defaults of ``transformers``."""

    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_hidden_layers: _Layers
    vocab_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    tie_word_embeddings: bool | None = False
    # Set where layers cost otherwise than those of dense, grouped-query attention.
    num_experts: Any = None
    num_local_experts: Any = None
    n_routed_experts: Any = None
    kv_lora_rank: Any = None
    ssm_cfg: Any = None


_NOT_DENSE = _HuggingFaceSizes.__struct_fields__[-5:]


def model_named(name: str) -> ModelPreset:
    """A public model by its name, or the model that a directory's config.json describes.

    Raises:
        WorkloadError: it is neither, or no dense model.
    """
    if name in MODELS:
        return MODELS[name]
    directory = Path(name)
    if not name or not directory.is_dir():
        raise WorkloadError(
            f"--model {name}: is no directory with a config.json; give one, or one of "
            f"{', '.join(MODELS)}"
        )
    path = directory / "config.json"
    try:
        sizes = read_json(path, _HuggingFaceSizes)
    except UnreadableFileError as error:
        raise WorkloadError(f"{path}: {error}; give a model's directory") from error
    for key in _NOT_DENSE:
        if value := getattr(sizes, key):
            raise WorkloadError(
                f"{path}: {key} {str(value)[:60]}: only dense models have counted costs; measure "
                "this one with `sparse-balance profile` and give --cost-table"
            )
    heads = sizes.num_attention_heads
    kv_heads = sizes.num_key_value_heads or heads
    if heads % kv_heads:
        raise WorkloadError(f"{path}: num_key_value_heads {kv_heads}: must divide {heads} heads")
    return _preset(
        directory.resolve().name,
        sizes.num_hidden_layers,
        *(sizes.hidden_size, sizes.intermediate_size, heads, kv_heads),
        *(sizes.head_dim or max(1, sizes.hidden_size // heads), sizes.vocab_size),
        tied_embeddings=bool(sizes.tie_word_embeddings),
    )
