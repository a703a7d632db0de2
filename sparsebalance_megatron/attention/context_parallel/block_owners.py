# SPDX-License-Identifier: Apache-2.0
"""Which member of a context group holds which block of a packed row: host arithmetic only.

Shape legend: T tokens (of the packed row or of a member's row), S documents, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.attention.block_grid import BlockGrid, block_grid


def deal(blocks: int, members: int, first: int = 0) -> np.ndarray:
    """Deal the blocks of a row in turn, through the whole row and on over its documents.

    Block j belongs to member (``first`` + j) mod ``members``. Every document is spread alike, so
    whatever budget a document gets, its work is spread alike too.

    Returns:
        owner_N: int64, a member per block.
    """
    return (first + np.arange(blocks, dtype=np.int64)) % members


def dealt_row(
    cu_seqlens: Sequence[int], block_size: int, members: int, first: int = 0
) -> BlockOwners:
    """A packed row whose blocks are dealt in turn, see :func:`deal`.

    Raises:
        ValueError: the row cannot be cut (:func:`..block_grid.block_grid`), or has fewer blocks
            than members.
    """
    boundaries = tuple(int(boundary) for boundary in cu_seqlens)
    blocks = len(block_grid(boundaries, block_size).start_N)
    return BlockOwners(
        cu_seqlens=boundaries,
        block_size=block_size,
        owner_N=deal(blocks, members, first),
        members=members,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockOwners:
    """A packed row in document-aligned blocks, each of which lies whole on one member.

    A member's own row holds its blocks in the order of the packed row, so that blocks of one
    document lie side by side, and none but a document's last is short.

    Attributes:
        cu_seqlens: document boundaries in tokens, S + 1 entries, the first is 0.
        block_size: tokens of a full block.
        owner_N: int64, the member that holds a block.
        members: members of the context group; each holds at least one block.
    """

    cu_seqlens: tuple[int, ...]
    block_size: int
    owner_N: np.ndarray
    members: int

    def __post_init__(self) -> None:
        if self.members < 1:
            raise ValueError(f"context group of {self.members} members: must have at least 1")
        blocks = len(self._grid.start_N)
        if self.owner_N.shape != (blocks,) or self.owner_N.dtype != np.int64:
            raise ValueError(
                f"owner_N is {self.owner_N.dtype} of shape {self.owner_N.shape}: must be int64 "
                f"with one member for each of the row's {blocks} blocks"
            )
        if self.owner_N.min() < 0 or self.owner_N.max() >= self.members:
            raise ValueError(
                f"owner_N names members {self.owner_N.min()} to {self.owner_N.max()}: the context "
                f"group has members 0 to {self.members - 1}"
            )
        idle = np.flatnonzero(np.array(self.blocks_per_member) == 0)
        if len(idle):
            raise ValueError(
                f"a row of {blocks} blocks on {self.members} members leaves none to member "
                f"{idle[0]}: give the row at most {blocks} members, or smaller blocks"
            )

    @cached_property
    def blocks_per_member(self) -> tuple[int, ...]:
        return tuple(np.bincount(self.owner_N, minlength=self.members).tolist())

    @cached_property
    def tokens_per_member(self) -> tuple[int, ...]:
        tokens = np.zeros(self.members, dtype=np.int64)
        np.add.at(tokens, self.owner_N, self._grid.length_N)
        return tuple(tokens.tolist())

    def blocks_of(self, member: int) -> np.ndarray:
        """Numbers in the packed row of the blocks in a member's row; int64, rising."""
        return np.flatnonzero(self.owner_N == member)

    def tokens_of(self, member: int) -> np.ndarray:
        """Numbers in the packed row of the tokens in a member's row; int64 [T], rising.

        Indexing with it cuts tokens, labels, masks or positions.
        """
        held = self.blocks_of(member)
        start, length = self._grid.start_N[held], self._grid.length_N[held]
        local_start = np.cumsum(length) - length
        return np.repeat(start - local_start, length) + np.arange(length.sum())

    def cu_seqlens_of(self, member: int) -> tuple[int, ...]:
        """Boundaries in a member's row of the documents of which it holds a block."""
        held = self.blocks_of(member)
        tokens_S = np.zeros(len(self.cu_seqlens) - 1, dtype=np.int64)
        np.add.at(tokens_S, self._grid.document_N[held], self._grid.length_N[held])
        return (0, *np.cumsum(tokens_S[tokens_S > 0]).tolist())

    @cached_property
    def _grid(self) -> BlockGrid:
        return block_grid(self.cu_seqlens, self.block_size)
