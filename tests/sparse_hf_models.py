# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models that read sparsely, in float64."""

from typing import Any

import torch
import transformers

from sparsebalance_megatron import evaluate

VOCABULARY, BLOCK = 97, 16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")


def make_model(
    family: str = "Llama",
    selection: str = "token-query-head",
    budget: int = 3,
    layers: int = 2,
    **settings: Any,
) -> Any:
    model = make_bare_model(family, num_hidden_layers=layers)
    evaluate.configure(
        model,
        sparse_block_size=BLOCK,
        sparse_topk_blocks=budget,
        sparse_selection=selection,
        **settings,
    )
    return model


def make_bare_model(family: str, **config: Any) -> Any:
    """Without settings of sparse attention."""
    config = {"head_dim": 16, "num_hidden_layers": 2, **config}
    if family == "Mistral":
        config = {"sliding_window": None, **config}
    if family == "Qwen3Moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(3)
    settings = getattr(transformers, f"{family}Config")(**SIZES, **config)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).double().eval()
    if family == "Qwen3Moe":
        # Its grouped product takes no float64.
        model.set_experts_implementation("eager")
    model.set_attn_implementation(evaluate.NAME)
    return model


def make_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))
