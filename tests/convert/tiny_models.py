# SPDX-License-Identifier: Apache-2.0
"""Tiny models of `transformers` with random weights, large enough that every part shows."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 250
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Ten times the usual: attention is far from uniform, and its positions matter.
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"vocab_size": 256, "num_key_value_heads": 4}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "llama-plain": ("llama", {"num_key_value_heads": 1}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "mistral-wide-heads": ("mistral", {"head_dim": 24, "sliding_window": None}),
    "qwen3-tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-linear": ("qwen3", {"head_dim": 32, "rope_parameters": _LINEAR}),
    "qwen3_moe-shares": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        _EXPERTS | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
    ),
}
"""Name -> (model type, what differs from the common shape)."""


def tiny_config(variant: str, **changes: Any) -> Any:
    model_type, settings = VARIANTS[variant]
    return AutoConfig.for_model(model_type, **(_SHAPE | settings | changes))


def tiny_model(variant: str, **changes: Any) -> torch.nn.Module:
    """In float32; no parameter is constant, so that none can be mistaken for another."""
    torch.manual_seed(len(variant))
    model = AutoModelForCausalLM.from_config(tiny_config(variant, **changes))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, mean=1.0, std=0.2)
    if hasattr(model, "set_experts_implementation"):
        # Its grouped product takes no float64.
        model.set_experts_implementation("eager")
    return model.eval()


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that ``save_pretrained`` writes: of experts, one by one."""
    with TemporaryDirectory() as directory:
        return load_file(save(model, Path(directory)) / "model.safetensors")


def save(model: torch.nn.Module, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory
