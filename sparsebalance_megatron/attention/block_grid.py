# SPDX-License-Identifier: Apache-2.0
"""How a packed row is cut into blocks: arithmetic of the host, without tensors.

Shape legend: S documents, N blocks of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGrid:
    """Document-aligned blocks: the grid starts anew at every document, whose last may be short.

    All arrays are int64.

    Attributes:
        boundaries: document boundaries in tokens, S + 1 entries, the first is 0.
        document_N, index_N: a block's document, and its number inside that document.
        start_N, length_N: a block's first token, and its tokens.
        first_block_S, blocks_S: a document's first block, and its blocks.
    """

    boundaries: np.ndarray
    document_N: np.ndarray
    index_N: np.ndarray
    start_N: np.ndarray
    length_N: np.ndarray
    first_block_S: np.ndarray
    blocks_S: np.ndarray


def block_grid(cu_seqlens: Sequence[int] | np.ndarray, block_size: int) -> BlockGrid:
    """Cut a packed row into blocks.

    Args:
        cu_seqlens: S + 1 document boundaries in tokens, from 0, strictly increasing.
        block_size: tokens of a full block.

    Raises:
        ValueError: ``cu_seqlens`` has fewer than two entries, does not start at 0, or does not
            increase; ``block_size`` is below 1.
    """
    boundaries = np.asarray(cu_seqlens, dtype=np.int64)
    _check(boundaries, block_size)
    blocks_S = -(-np.diff(boundaries) // block_size)
    first_block_S = np.cumsum(blocks_S) - blocks_S
    document_N = np.repeat(np.arange(len(blocks_S)), blocks_S)
    index_N = np.arange(len(document_N)) - first_block_S[document_N]
    start_N = boundaries[document_N] + index_N * block_size
    return BlockGrid(
        boundaries=boundaries,
        document_N=document_N,
        index_N=index_N,
        start_N=start_N,
        length_N=np.minimum(block_size, boundaries[document_N + 1] - start_N),
        first_block_S=first_block_S,
        blocks_S=blocks_S,
    )


def _check(boundaries: np.ndarray, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"packed row: block_size {block_size}: must be at least 1 token")
    if boundaries.ndim != 1 or len(boundaries) < 2:
        raise ValueError("packed row: cu_seqlens must hold at least one document: [0, tokens]")
    if boundaries[0] != 0:
        raise ValueError(f"packed row: cu_seqlens starts at {boundaries[0]}: must start at 0")
    lengths = np.diff(boundaries)
    if (lengths < 1).any():
        document = int(np.argmax(lengths < 1))
        raise ValueError(
            f"packed row: cu_seqlens must increase; document {document} has "
            f"{lengths[document]} tokens: leave empty documents out"
        )
