# SPDX-License-Identifier: Apache-2.0
"""What the cost of a micro-batch is affine in: counts of sequences, tokens and block pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

FEATURES = ("micro_batches", "sequences", "tokens", "block_pairs", "visible_block_pairs")
"""Order of the feature vector; every entry adds up over the documents of a micro-batch."""


def attended_block_pairs(
    tokens: ArrayLike, budget_blocks: ArrayLike, block_size: int
) -> np.ndarray:
    """Block pairs computed for a document whose queries may read ``budget_blocks`` KV blocks.

    Query block j = 1..n with l_j tokens counts ``(l_j / B) * (min(j, k) - 1 + l_j / B)``: whole
    blocks before it and its own, both fractional where the block is short. For whole blocks this
    is ``sum_j min(j, k)``.

    Args:
        tokens: length of the document, at least 0; any shape.
        budget_blocks: k, at least 1, infinity for dense attention; broadcast against ``tokens``.
        block_size: B, tokens per block.

    Returns:
        float64 of the broadcast shape.
    """
    length_blocks = np.asarray(tokens, dtype=np.float64) / block_size
    blocks = np.ceil(length_blocks)
    budget = np.minimum(budget_blocks, blocks)
    whole_blocks = np.maximum(blocks - 1.0, 0.0)
    rising = np.minimum(whole_blocks, budget)
    whole_pairs = rising * (rising + 1.0) / 2.0 + budget * (whole_blocks - rising)
    tail = length_blocks - whole_blocks
    return whole_pairs + tail * (budget - 1.0 + tail) * (blocks > 0.0)


def visible_block_pairs(tokens: ArrayLike, block_size: int) -> np.ndarray:
    """Causal block pairs of a document, whatever its budget: what the router scores.

    The same as :func:`attended_block_pairs` without a budget.
    """
    return attended_block_pairs(tokens, np.inf, block_size)


def features(lengths_tokens: ArrayLike, budgets_blocks: ArrayLike, block_size: int) -> np.ndarray:
    """Feature vector of one micro-batch, in the order of :data:`FEATURES`.

    Args:
        lengths_tokens: [S], one length per document.
        budgets_blocks: [S] or one budget for all; infinity for dense attention.
        block_size: tokens per block.

    Returns:
        [5] float64.
    """
    lengths_S = np.asarray(lengths_tokens, dtype=np.float64)
    return np.array(
        [
            1.0,
            lengths_S.size,
            lengths_S.sum(),
            attended_block_pairs(lengths_S, budgets_blocks, block_size).sum(),
            visible_block_pairs(lengths_S, block_size).sum(),
        ]
    )
