# SPDX-License-Identifier: Apache-2.0
"""Sizes of public models, and of models that a Hugging Face config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sparsebalance_megatron.config import DEFAULT_COUNTED_DEVICE, DEFAULT_SELECTION, CountedDevice
from sparsebalance_megatron.cost.experts import ExpertShape
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.rates import Efficiency
from sparsebalance_megatron.cost.table import ModelShape, latent_attention_weights
from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.predict.lengths import WorkloadError


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """Sizes of a model with gated MLPs. ``shape`` is of a tensor-parallel rank that has it all."""

    name: str
    layers: int
    shape: ModelShape
    tied_embeddings: bool

    @property
    def parameters(self) -> float:
        """Weights, without norms and biases."""
        shape, embeddings = self.shape, 1 if self.tied_embeddings else 2
        experts = shape.experts.experts if shape.experts else 0
        layer = shape.layer_weights + shape.routed_weights(experts)
        return self.layers * layer + embeddings * shape.vocabulary_weights

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
    expert_parallel_size: int = 1,
    selection: str = DEFAULT_SELECTION,
    device: CountedDevice = DEFAULT_COUNTED_DEVICE,
    efficiency: Efficiency | None = None,
    gigabytes_per_second: float | None = None,
) -> CostModel:
    """A model's counted operations at a device's rates, and exchanges at a bandwidth.

    Raises:
        WorkloadError: the tensor-parallel ranks do not divide the heads.
    """
    cost = CostModel.analytic(
        model.on_ranks(tensor_parallel_size),
        block_size,
        selection=selection,
        device=device,
        efficiency=efficiency,
        expert_parallel_size=expert_parallel_size,
        gigabytes_per_second=gigabytes_per_second,
    )
    return replace(cost, source=f"{model.name}: {cost.source}")


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

_EXPERTS: Mapping[str, tuple[tuple[int, ...], tuple[int, int, int, int], int]] = {
    "qwen3-30b-a3b": ((48, 2048, 6144, 32, 4, 128, 151936), (128, 8, 768, 0), 0),
    "qwen3-235b-a22b": ((94, 4096, 12288, 64, 4, 128, 151936), (128, 8, 1536, 0), 0),
    "deepseek-v2-lite": ((27, 2048, 10944, 16, 16, 192, 102400), (64, 6, 1408, 2 * 1408), 1),
    "deepseek-v3": ((61, 7168, 18432, 128, 128, 192, 129280), (256, 8, 2048, 2048), 3),
    "kimi-k2": ((61, 7168, 18432, 64, 64, 192, 163840), (384, 8, 2048, 2048), 1),
    "glm-4.5": ((92, 5120, 12288, 96, 8, 128, 151552), (160, 8, 1536, 1536), 3),
    "gpt-oss-20b": ((24, 2880, 2880, 64, 8, 64, 201088), (32, 4, 2880, 0), 0),
    "gpt-oss-120b": ((36, 2880, 2880, 64, 8, 64, 201088), (128, 4, 2880, 0), 0),
}
"""Name -> a model as above; routed experts, those of a token, their size, that of shared ones
together; dense layers before the first with experts. gpt-oss's sliding windows are taken for full
attention, and layers that predict further tokens are left out."""
_QUERY_RANKS = {"deepseek-v2-lite": None, "deepseek-v3": 1536, "kimi-k2": 1536}
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
    sizes, (experts, top_k, ffn_hidden_size, shared), dense_layers = _EXPERTS[name]
    preset = _preset(name, *sizes, tied_embeddings=False)
    shape = replace(
        preset.shape,
        experts=ExpertShape(
            experts=experts,
            top_k=top_k,
            ffn_hidden_size=ffn_hidden_size,
            shared_ffn_hidden_size=shared,
            layers_share=1.0 - dense_layers / preset.layers,
        ),
    )
    if name in _QUERY_RANKS:
        shape = _with_latent_attention(shape, _QUERY_RANKS[name])
    return replace(preset, shape=shape)


def _with_latent_attention(
    shape: ModelShape,
    q_rank: int | None,
    *,
    kv_rank: int = 512,
    qk_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
) -> ModelShape:
    weights = latent_attention_weights(
        hidden_size=shape.hidden_size,
        heads=shape.num_attention_heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        qk_dim=qk_dim,
        rotary_dim=rotary_dim,
        value_dim=value_dim,
    )
    head_dim = qk_dim + rotary_dim
    return replace(shape, head_dim=head_dim, value_head_dim=value_dim, attention_weights=weights)


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
    # Routed experts, under the names that model families give them.
    num_experts: _Size | None = None
    num_local_experts: _Size | None = None
    n_routed_experts: _Size | None = None
    num_experts_per_tok: _Size | None = None
    experts_per_token: _Size | None = None
    moe_intermediate_size: _Size | None = None
    shared_expert_intermediate_size: _Size | None = None
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0, le=2**16)] | None = None
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: _Size | None = None
    # Multi-latent attention.
    kv_lora_rank: _Size | None = None
    q_lora_rank: _Size | None = None
    qk_nope_head_dim: _Size = 128
    qk_rope_head_dim: _Size = 64
    v_head_dim: _Size = 128
    # What training refuses too.
    vision_config: Any = None
    audio_config: Any = None
    ssm_cfg: Any = None
    layer_types: list[str] | None = None
    linear_num_value_heads: Any = None
    mamba_d_state: Any = None
    hybrid_override_pattern: Any = None
    rope_scaling: Any = None


_REFUSED = {
    "vision_config": "images have positions of several dimensions (mrope)",
    "audio_config": "audio is no text",
    "ssm_cfg": "layers of state-space models have no attention",
    "mamba_d_state": "layers of state-space models have no attention",
    "hybrid_override_pattern": "layers of state-space models have no attention",
    "linear_num_value_heads": "layers of linear attention have no blocks to select",
}
"""Key of config.json -> why no job with it is predicted; training refuses it likewise."""


def model_named(name: str) -> ModelPreset:
    """A public model by its name, or the model of a config.json or of a directory with one.

    Raises:
        WorkloadError: it is neither, or training would refuse the model.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir() and name:
        path = path / "config.json"
    elif path.suffix != ".json":
        raise WorkloadError(
            f"--model {name}: is no directory with a config.json and no such file; give one, or "
            f"one of {', '.join(MODELS)}"
        )
    try:
        sizes = read_json(path, _HuggingFaceSizes)
    except UnreadableFileError as error:
        raise WorkloadError(f"{path}: {error}; give a model's directory or config.json") from error
    _check_attention(sizes, path)
    heads = sizes.num_attention_heads
    kv_heads = sizes.num_key_value_heads or heads
    if heads % kv_heads:
        raise WorkloadError(f"{path}: num_key_value_heads {kv_heads}: must divide {heads} heads")
    if sizes.hidden_size % heads and not (sizes.head_dim or sizes.kv_lora_rank):
        raise WorkloadError(
            f"{path}: hidden_size {sizes.hidden_size}: {heads} heads do not divide it; correct "
            "one, or add head_dim"
        )
    preset = _preset(
        path.resolve().parent.name if path.name == "config.json" else path.stem,
        sizes.num_hidden_layers,
        *(sizes.hidden_size, sizes.intermediate_size, heads, kv_heads),
        *(sizes.head_dim or sizes.hidden_size // heads or 1, sizes.vocab_size),
        tied_embeddings=bool(sizes.tie_word_embeddings),
    )
    shape = replace(preset.shape, experts=_experts(sizes, path))
    if sizes.kv_lora_rank:
        shape = _with_latent_attention(
            shape,
            sizes.q_lora_rank,
            kv_rank=sizes.kv_lora_rank,
            qk_dim=sizes.qk_nope_head_dim,
            rotary_dim=sizes.qk_rope_head_dim,
            value_dim=sizes.v_head_dim,
        )
    return replace(preset, shape=shape)


def _check_attention(sizes: _HuggingFaceSizes, path: Path) -> None:
    """Refuse what training refuses."""
    reasons = {key: reason for key, reason in _REFUSED.items() if getattr(sizes, key)}
    if isinstance(sizes.rope_scaling, dict) and "mrope_section" in sizes.rope_scaling:
        reasons["rope_scaling"] = _REFUSED["vision_config"]
    if any("linear" in kind or "mamba" in kind for kind in sizes.layer_types or ()):
        reasons["layer_types"] = _REFUSED["linear_num_value_heads"]
    for key, reason in reasons.items():
        raise WorkloadError(f"{path}: {key}: {reason}; training refuses it too, use another model")


def _experts(sizes: _HuggingFaceSizes, path: Path) -> ExpertShape | None:
    """The experts of a config.json, or None.

    Raises:
        WorkloadError: a size that is needed is missing.
    """
    experts = sizes.num_experts or sizes.num_local_experts or sizes.n_routed_experts
    if not experts:
        return None
    top_k = sizes.num_experts_per_tok or sizes.experts_per_token
    if top_k is None:
        raise WorkloadError(f"{path}: num_experts_per_tok is missing; add it")
    ffn_hidden_size = sizes.moe_intermediate_size or sizes.intermediate_size
    shared = (
        sizes.shared_expert_intermediate_size or (sizes.n_shared_experts or 0) * ffn_hidden_size
    )
    layers, step = sizes.num_hidden_layers, sizes.decoder_sparse_step or 1
    first, others = sizes.first_k_dense_replace or 0, set(sizes.mlp_only_layers or ())
    sparse = [n for n in range(first, layers) if n not in others and (n + 1) % step == 0]
    if not sparse:
        return None
    return ExpertShape(
        experts=experts,
        top_k=top_k,
        ffn_hidden_size=ffn_hidden_size,
        shared_ffn_hidden_size=shared,
        layers_share=len(sparse) / layers,
    )
