# SPDX-License-Identifier: Apache-2.0
"""What a dense decoder is, apart from its weights: what config.json and Megatron's flags say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Family = Literal["llama", "mistral", "qwen2"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        base: theta of the rotation's periods.
        kind: how the periods are stretched for long contexts.
        factor: by how much; 1 for "default".
        original_positions: positions before stretching; "llama3" and "yarn" only.
        beta_fast, beta_slow, mscale, mscale_all_dim: of YaRN (arXiv:2309.00071); "yarn" only.
    """

    base: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """A decoder of RMSNorm, (grouped-query) attention with RoPE, and SwiGLU.

    Attributes:
        vocab_size: rows of the embedding as Hugging Face has them, without Megatron's padding.
        tied: whether the output layer is the embedding.
        qkv_bias: whether the query, key and value projections have biases; nothing else has.
        dtype: what config.json names, or None where it names nothing.
    """

    family: Family
    layers: int
    hidden_size: int
    ffn_hidden_size: int
    attention_heads: int
    query_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    attention_dropout: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    dtype: torch.dtype | None
