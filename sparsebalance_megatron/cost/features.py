# SPDX-License-Identifier: Apache-2.0
"""What the cost of a micro-batch is affine in: counts of sequences, tokens and block pairs.

Shape legend: S samples or documents of a micro-batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sparsebalance_megatron.cost.work_model import WorkModel

FEATURES = ("micro_batches", "sequences", "tokens", "block_pairs", "visible_block_pairs")
"""Order of the feature vector; every entry adds up over the documents of a micro-batch."""


def features(
    lengths_tokens: ArrayLike, budgets_blocks: ArrayLike, block_size: int, work: WorkModel
) -> np.ndarray:
    """Feature vector of one micro-batch, in the order of :data:`FEATURES`.

    Args:
        lengths_tokens: [S], one length per document.
        budgets_blocks: [S] or one budget for all; infinity for dense attention.
        block_size: tokens per block.
        work: what the selection computes.

    Returns:
        [5] float64.
    """
    lengths_S = np.asarray(lengths_tokens, dtype=np.float64)
    return np.array(
        [
            1.0,
            lengths_S.size,
            lengths_S.sum(),
            work.attended_pairs(lengths_S / block_size, budgets_blocks).sum(),
            work.visible_pairs(lengths_S / block_size).sum(),
        ]
    )
