# SPDX-License-Identifier: Apache-2.0
"""Operations that training a GPT takes, counted: with budgets, and with dense attention.

Matrix multiplications only, two operations per multiply-add, of the whole model whatever its
tensor-parallel size; backward counts twice the forward, recomputation and routing not at all.

Shape legend: S samples or documents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.cost.work_model import TOKEN_QUERY_HEAD

_FORWARD_AND_BACKWARD = 3


def attended_token_pairs(
    tokens: ArrayLike, budget_blocks: ArrayLike, block_size: int
) -> np.ndarray:
    """(query, key) pairs of a document whose queries may read ``budget_blocks`` KV blocks.

    A query reads the tokens of its own block up to itself, and all of k - 1 blocks before it, or of
    as many as there are: the block pairs of selection, without what causality masks. A budget of
    infinity is dense. Blocks are a power of two of tokens, so that the result is exact.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    whole_blocks, tail = np.divmod(tokens, block_size)
    masked = whole_blocks * (block_size * (block_size - 1) // 2) + tail * (tail - 1) // 2
    pairs = TOKEN_QUERY_HEAD.attended_pairs(tokens / block_size, budget_blocks) * block_size**2
    return pairs - masked


def training_flops(
    shape: ModelShape,
    *,
    layers: int,
    lengths_tokens_S: ArrayLike,
    budgets_LS: np.ndarray | None,
    block_size: int,
) -> float:
    """Operations of forward and backward of the whole model over some documents.

    ``layers`` of the whole model; ``budgets_LS`` None is dense causal attention.
    """
    lengths_S = np.asarray(lengths_tokens_S, dtype=np.int64)
    budgets = np.full((layers, 1), np.inf) if budgets_LS is None else budgets_LS
    pairs = int(attended_token_pairs(lengths_S, budgets, block_size).sum())
    top_k = shape.experts.top_k if shape.experts else 0
    layer = shape.layer_weights + shape.routed_weights(top_k)
    per_token = 2 * (layers * layer + shape.vocabulary_weights)
    attention = 2 * shape.num_attention_heads * (shape.head_dim + shape.value_dim) * pairs
    return float(_FORWARD_AND_BACKWARD * (per_token * int(lengths_S.sum()) + attention))
