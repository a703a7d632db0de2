# SPDX-License-Identifier: Apache-2.0
"""Positions of the blocks of a packed sequence: once a micro-batch, for all of its layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import copied_to

_ALIGNED_ELEMENTS = 16
"""int64 elements in 128 bytes."""


def made_once[Owner, Made](make: Callable[[Owner, int], Made]) -> Callable[[Owner, int], Made]:
    """A method of one number, whose results live as long as its object."""

    @wraps(make)
    def kept(owner: Owner, number: int) -> Made:
        results = vars(owner).setdefault(f"_{make.__name__}", {})
        if number not in results:
            results[number] = make(owner, number)
        found: Made = results[number]
        return found

    return kept


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGrid:
    """Document-aligned blocks: the grid starts anew at every document, whose last may be short.

    All arrays are int64, on the host.

    Attributes:
        boundaries: of documents in tokens, S + 1 entries from 0.
        document_N, index_N: a block's document, and its number inside that document.
        start_N, length_N: a block's first token, and its tokens.
        first_block_S, blocks_S, tokens_S: a document's first block, its blocks, its tokens.
    """

    block_size: int
    boundaries: np.ndarray
    document_N: np.ndarray
    index_N: np.ndarray
    start_N: np.ndarray
    length_N: np.ndarray
    first_block_S: np.ndarray
    blocks_S: np.ndarray
    tokens_S: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """A packed sequence cut into document-aligned blocks.

    Every tensor is int64 on the device of the sequence.

    Attributes:
        grid: the blocks on the host; tensors have the names that it has.
        cu_seqlens: S + 1 document boundaries in tokens, from 0.
        tokens, documents, blocks: how many there are.
        max_blocks: of a document.
        block_tokens: B, tokens of the longest block. Below ``block_size`` where every document is
            shorter.
        bounds_on_host: N + 1 tokens: where each block begins, and the end of the sequence.
        number_N: 0 to N - 1.
        document_first_N, document_end_N: the first block of a block's document, and one past the
            document's last token.
        block_T: a token's block.
        place_T: a token's place in a buffer of N blocks with B places each.
    """

    grid: BlockGrid
    block_size: int
    cu_seqlens: tuple[int, ...]
    tokens: int
    documents: int
    blocks: int
    max_blocks: int
    block_tokens: int
    bounds_on_host: np.ndarray
    number_N: Tensor
    document_N: Tensor
    index_N: Tensor
    start_N: Tensor
    length_N: Tensor
    document_first_N: Tensor
    document_end_N: Tensor
    first_block_S: Tensor
    blocks_S: Tensor
    tokens_S: Tensor
    block_T: Tensor
    place_T: Tensor

    @cached_property
    def position_T(self) -> Tensor:
        """int64: a token's place in its document."""
        token_T = torch.arange(self.tokens, device=self.block_T.device)
        first_T = self.start_N - self.index_N * self.block_size
        return token_T - first_T[self.block_T]

    @cached_property
    def bounds_S1(self) -> Tensor:
        """int32: where each document begins, and the end of the sequence."""
        return torch.nn.functional.pad(self.tokens_S.cumsum(0), (1, 0)).int()

    @cached_property
    def blocks_per_document(self) -> tuple[int, ...]:
        return tuple(self.grid.blocks_S.tolist())

    @made_once
    def split(self, documents: int) -> "tuple[PackedLayout, PackedLayout]":
        """Layouts of the first documents, and of all others, of which there are some; made once."""
        boundaries = self.grid.boundaries
        parts = boundaries[: documents + 1], boundaries[documents:] - boundaries[documents]
        first, rest = (packed_layout(x, self.block_size, self.block_T.device) for x in parts)
        return first, rest

    def to_blocks(self, x_T: Tensor, blocks: slice | None = None) -> Tensor:
        """[T, ...] to [N, B, ...], of all blocks or of some: a view; zeros in the places past a
        short block's end."""
        first, last = (blocks.start, blocks.stop) if blocks else (0, self.blocks)
        tokens = slice(int(self.bounds_on_host[first]), int(self.bounds_on_host[last]))
        x_T, place_T = x_T[tokens], self.place_T[tokens]
        shape = last - first, self.block_tokens
        if len(x_T) == shape[0] * shape[1]:
            return x_T.unflatten(0, shape)
        if first:
            place_T = place_T - first * self.block_tokens
        padded = x_T.new_zeros(shape[0] * shape[1], *x_T.shape[1:])
        return padded.index_copy_(0, place_T, x_T).unflatten(0, shape)

    def from_blocks(self, x_NB: Tensor) -> Tensor:
        """[N, B, ...] to [T, ...]; the inverse of :meth:`to_blocks`."""
        x = x_NB.reshape(self.blocks * self.block_tokens, *x_NB.shape[2:])
        return x if self.tokens == x.shape[0] else x.index_select(0, self.place_T)


def packed_layout(
    cu_seqlens: Sequence[int] | np.ndarray, block_size: int, device: torch.device | str
) -> PackedLayout:
    """Cut a packed sequence into blocks, with tensors on ``device``; see :func:`block_grid`."""
    grid = block_grid(cu_seqlens, block_size)
    tokens, block_tokens = int(grid.boundaries[-1]), int(grid.length_N.max())
    number_N = np.arange(len(grid.start_N))
    block_T = np.repeat(number_N, grid.length_N)
    place_T = np.arange(tokens) - grid.start_N[block_T]
    alike = ("document_N", "index_N", "start_N", "length_N", "first_block_S", "blocks_S")
    tensors = {name: getattr(grid, name) for name in (*alike, "tokens_S")} | {
        "number_N": number_N,
        "document_first_N": grid.first_block_S[grid.document_N],
        "document_end_N": grid.boundaries[grid.document_N + 1],
        "block_T": block_T,
        "place_T": block_T * block_tokens + place_T,
    }
    return PackedLayout(
        grid=grid,
        block_size=block_size,
        cu_seqlens=tuple(grid.boundaries.tolist()),
        tokens=tokens,
        documents=len(grid.blocks_S),
        blocks=len(number_N),
        max_blocks=int(grid.blocks_S.max()),
        block_tokens=block_tokens,
        bounds_on_host=np.append(grid.start_N, tokens),
        **_arrays_to(tensors, device),
    )


def block_grid(cu_seqlens: Sequence[int] | np.ndarray, block_size: int) -> BlockGrid:
    """Cut a packed sequence, of S + 1 document boundaries in tokens, into blocks.

    Raises:
        ValueError: boundaries do not begin at 0 and increase, or ``block_size`` is below 1.
    """
    boundaries = np.asarray(cu_seqlens, dtype=np.int64)
    if block_size < 1:
        raise ValueError(f"packed sequence: block_size {block_size}: must be at least 1 token")
    if boundaries.ndim != 1 or len(boundaries) < 2:
        raise ValueError("packed sequence: cu_seqlens must hold at least one document: [0, tokens]")
    if boundaries[0] != 0:
        raise ValueError(f"packed sequence: cu_seqlens starts at {boundaries[0]}: must start at 0")
    tokens_S = np.diff(boundaries)
    if (tokens_S < 1).any():
        document = int(np.argmax(tokens_S < 1))
        raise ValueError(
            f"packed sequence: cu_seqlens must increase; document {document} has "
            f"{tokens_S[document]} tokens: leave empty documents out"
        )
    blocks_S = -(-tokens_S // block_size)
    first_block_S = np.cumsum(blocks_S) - blocks_S
    document_N = np.repeat(np.arange(len(blocks_S)), blocks_S)
    index_N = np.arange(len(document_N)) - first_block_S[document_N]
    start_N = boundaries[document_N] + index_N * block_size
    return BlockGrid(
        block_size=block_size,
        boundaries=boundaries,
        document_N=document_N,
        index_N=index_N,
        start_N=start_N,
        length_N=np.minimum(block_size, boundaries[document_N + 1] - start_N),
        first_block_S=first_block_S,
        blocks_S=blocks_S,
        tokens_S=tokens_S,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutPair:
    """Queries and the keys they select from.

    Where a rank holds some blocks of a sequence, its queries form a sequence of their own, while
    the keys are those of the whole sequence.

    Attributes:
        query_layout: the blocks of the queries, in any order.
        kv_layout: the blocks of the keys, documents whole and their blocks in order.
        own_blocks: N entries on the host, for every query block the number in ``kv_layout`` of the
            block that it is itself.
        own_block_N: the same, int64 on the device.
    """

    query_layout: PackedLayout
    kv_layout: PackedLayout
    own_blocks: Sequence[int]
    own_block_N: Tensor

    @classmethod
    def within(cls, layout: PackedLayout) -> "LayoutPair":
        """Queries and keys of one sequence."""
        return cls(
            query_layout=layout,
            kv_layout=layout,
            own_blocks=range(layout.blocks),
            own_block_N=layout.number_N,
        )

    @classmethod
    def of_blocks(
        cls, query_layout: PackedLayout, kv_layout: PackedLayout, own_blocks: Sequence[int]
    ) -> "LayoutPair":
        """Queries of some blocks of the keys' sequence; others in ``own_blocks`` are a
        ValueError."""
        own_N = np.asarray(own_blocks, dtype=np.int64)
        lengths_N = query_layout.grid.length_N
        known = (own_N >= 0) & (own_N < kv_layout.blocks)
        fits = own_N.shape == lengths_N.shape and known.all()
        if not fits or (kv_layout.grid.length_N[own_N] != lengths_N).any():
            raise ValueError(
                f"own_blocks {own_N.tolist()}: must name one of the {kv_layout.blocks} blocks of "
                f"the keys' sequence for each of the {query_layout.blocks} query blocks, of the "
                "same length"
            )
        return cls(
            query_layout=query_layout,
            kv_layout=kv_layout,
            own_blocks=tuple(own_N.tolist()),
            own_block_N=copied_to(torch.from_numpy(own_N), query_layout.number_N.device),
        )

    def kv_block(self, *, by_token: bool) -> Tensor:
        """int64 [T] or [N]: the keys' block in which each query token lies, or each query block."""
        return self.own_block_N[self.query_layout.block_T] if by_token else self.own_block_N


def _arrays_to(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Int64 arrays as tensors on ``device``, in one copy; all are views of one tensor.

    Each begins at a multiple of 128 bytes: Triton compiles a kernel anew for pointers that are
    aligned otherwise than before.
    """
    pieces = []
    for x in arrays.values():
        pieces += [x, np.zeros(-len(x) % _ALIGNED_ELEMENTS, dtype=np.int64)]
    copied = copied_to(torch.from_numpy(np.concatenate(pieces)), device)
    parts = copied.split([len(piece) for piece in pieces])
    return dict(zip(arrays, parts[::2], strict=True))
