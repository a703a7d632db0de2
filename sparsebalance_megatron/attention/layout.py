# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a packed row lie. Built once per micro-batch, shared by its layers.

Shape legend: T tokens of the packed row, S documents, N blocks of the row, B places
of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import arrays_to


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """A packed row cut into document-aligned blocks.

    The block grid starts anew at every document, and the last block of a document may be short.
    Host values come first; every tensor is int64 on the device of the row.

    Attributes:
        cu_seqlens: document boundaries in tokens, S + 1 entries, the first is 0.
        block_size: tokens of a full block.
        blocks_per_document: S entries.
        number_N: a block's number in the row, 0 to N - 1.
        document_N, index_N: a block's document, and its number inside that document.
        start_N, length_N: a block's first token, and its tokens.
        document_end_N: one past the last token of a block's document.
        first_block_S, blocks_S, tokens_S: a document's first block, its blocks and its tokens.
        block_T: a token's block.
        place_T: a token's place in a buffer of N blocks with B places each.
    """

    cu_seqlens: tuple[int, ...]
    block_size: int
    blocks_per_document: tuple[int, ...]
    number_N: Tensor
    document_N: Tensor
    index_N: Tensor
    start_N: Tensor
    length_N: Tensor
    document_end_N: Tensor
    first_block_S: Tensor
    blocks_S: Tensor
    tokens_S: Tensor
    block_T: Tensor
    place_T: Tensor

    @property
    def tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def documents(self) -> int:
        return len(self.blocks_per_document)

    @cached_property
    def blocks(self) -> int:
        return sum(self.blocks_per_document)

    @cached_property
    def max_blocks(self) -> int:
        """Blocks of the document that has most."""
        return max(self.blocks_per_document)

    @cached_property
    def block_tokens(self) -> int:
        """B: tokens of the longest block. Below ``block_size`` where every document is shorter."""
        longest = max(np.diff(self.cu_seqlens))
        return min(self.block_size, int(longest))

    @cached_property
    def bounds_on_host(self) -> np.ndarray:
        """N + 1 tokens: where each block begins, and the end of the row."""
        boundaries = np.asarray(self.cu_seqlens)
        blocks_S = np.asarray(self.blocks_per_document)
        index_N = np.arange(self.blocks) - np.repeat(np.cumsum(blocks_S) - blocks_S, blocks_S)
        start_N = np.repeat(boundaries[:-1], blocks_S) + index_N * self.block_size
        return np.append(start_N, boundaries[-1])

    @cached_property
    def document_on_host(self) -> np.ndarray:
        """N documents: the one of each block."""
        return np.repeat(np.arange(self.documents), self.blocks_per_document)

    def to_blocks(self, x_T: Tensor) -> Tensor:
        """[T, ...] to [N, B, ...], zeros in the places past a short block's end.

        A view of ``x_T`` where no block is short.
        """
        size = self.block_tokens
        if self.tokens == self.blocks * size:
            return x_T.reshape(self.blocks, size, *x_T.shape[1:])
        padded = x_T.new_zeros(self.blocks * size, *x_T.shape[1:])
        padded.index_copy_(0, self.place_T, x_T)
        return padded.view(self.blocks, size, *x_T.shape[1:])

    def from_blocks(self, x_NB: Tensor) -> Tensor:
        """[N, B, ...] to [T, ...]; the inverse of :meth:`to_blocks`."""
        x = x_NB.reshape(self.blocks * self.block_tokens, *x_NB.shape[2:])
        return x if self.tokens == x.shape[0] else x.index_select(0, self.place_T)


def packed_layout(
    cu_seqlens: Sequence[int], block_size: int, device: torch.device | str
) -> PackedLayout:
    """Cut a packed row into blocks.

    Everything is computed on the host and copied to ``device`` once per tensor; the device is
    never read.

    Args:
        cu_seqlens: S + 1 document boundaries in tokens, from 0, strictly increasing.
        block_size: tokens of a full block.
        device: where the row lives.

    Raises:
        ValueError: ``cu_seqlens`` has fewer than two entries, does not start at 0, or does not
            increase; ``block_size`` is below 1.
    """
    grid = block_grid(cu_seqlens, block_size)
    tokens_S = np.diff(grid.boundaries)
    blocks = len(grid.document_N)
    block_T = np.repeat(np.arange(blocks), grid.length_N)
    block_tokens = min(block_size, int(tokens_S.max()))
    place_T = block_T * block_tokens + np.arange(grid.boundaries[-1]) - grid.start_N[block_T]
    tensors = {
        "number_N": np.arange(blocks),
        "document_N": grid.document_N,
        "index_N": grid.index_N,
        "start_N": grid.start_N,
        "length_N": grid.length_N,
        "document_end_N": grid.boundaries[grid.document_N + 1],
        "first_block_S": grid.first_block_S,
        "blocks_S": grid.blocks_S,
        "tokens_S": tokens_S,
        "block_T": block_T,
        "place_T": place_T,
    }
    return PackedLayout(
        cu_seqlens=tuple(int(boundary) for boundary in grid.boundaries),
        block_size=block_size,
        blocks_per_document=tuple(int(blocks) for blocks in grid.blocks_S),
        **arrays_to(tensors, device),
    )


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
