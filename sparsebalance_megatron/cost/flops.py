# SPDX-License-Identifier: Apache-2.0
"""Operations that training a GPT takes, counted: with budgets, and with dense attention.

Matrix multiplications only, two operations per multiply-add, of the whole model whatever its
tensor-parallel size; backward counts twice the forward, recomputation and routing not at all.

Shape legend: L layers, S samples or documents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sparsebalance_megatron.cost.table import ModelShape

_FORWARD_AND_BACKWARD = 3


def attended_token_pairs(
    tokens: ArrayLike, budget_blocks: ArrayLike, block_size: int
) -> np.ndarray:
    """(query, key) pairs of a document whose queries may read ``budget_blocks`` KV blocks.

    A query reads the tokens of its own block up to itself, and all of k - 1 blocks before it, or
    of as many as there are.

    Args:
        tokens: length of the document, at least 0; any shape.
        budget_blocks: k, at least 1; broadcast against ``tokens``.
        block_size: tokens per block.

    Returns:
        int64 of the broadcast shape, exact.
    """
    whole_blocks, tail = np.divmod(np.asarray(tokens, dtype=np.int64), block_size)
    others = np.asarray(budget_blocks, dtype=np.int64) - 1
    rising = np.minimum(whole_blocks, others)
    blocks_read = rising * (rising - 1) // 2 + others * (whole_blocks - rising)
    within_block = whole_blocks * (block_size * (block_size + 1) // 2) + tail * (tail + 1) // 2
    tail_read = tail * np.minimum(others, whole_blocks)
    return within_block + block_size * (block_size * blocks_read + tail_read)


def causal_token_pairs(tokens: ArrayLike) -> np.ndarray:
    """(query, key) pairs of dense causal attention within documents; int64, exact."""
    tokens = np.asarray(tokens, dtype=np.int64)
    return tokens * (tokens + 1) // 2


def training_flops(
    shape: ModelShape,
    *,
    layers: int,
    lengths_tokens_S: ArrayLike,
    budgets_LS: np.ndarray | None,
    block_size: int,
) -> float:
    """Operations of forward and backward of the whole model over some documents.

    Args:
        layers: of the whole model.
        budgets_LS: KV blocks that the queries of each document may read in each layer; None is
            dense causal attention.
    """
    lengths_S = np.asarray(lengths_tokens_S, dtype=np.int64)
    heads, groups, head_dim = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    projections = shape.hidden_size * head_dim * (2 * heads + 2 * groups)
    mlp = shape.hidden_size * shape.ffn_hidden_size * (3 if shape.gated_linear_unit else 2)
    head = shape.hidden_size * shape.vocab_size
    if budgets_LS is None:
        pairs = layers * int(causal_token_pairs(lengths_S).sum())
    else:
        pairs = int(attended_token_pairs(lengths_S, budgets_LS, block_size).sum())
    per_token = 2 * (layers * (projections + mlp) + head)
    forward = per_token * int(lengths_S.sum()) + 4 * heads * head_dim * pairs
    return float(_FORWARD_AND_BACKWARD * forward)
