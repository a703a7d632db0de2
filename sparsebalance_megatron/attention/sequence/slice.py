# SPDX-License-Identifier: Apache-2.0
"""The part of a packed sequence that one rank holds, and the group that holds the whole.

Shape legend: T tokens (of the packed sequence or of a slice), E head dims of keys and values side
by side, W members of the group.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.attention.layout import (
    BlockGrid,
    LayoutPair,
    PackedLayout,
    block_grid,
    packed_layout,
)
from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that share a packed sequence, of which this is ``member`` of ``members``.

    Attributes:
        exchange: how their keys and values travel; None where this rank holds the whole sequence.
        process_group: of the members.
        alone: a process group of this rank by itself.
        shares_heads: whether documents are attended to densely, each member with its heads.
        lists_by_heads: whether all documents are, those with lists too.
    """

    member: int = 0
    members: int = 1
    exchange: "SequenceExchange | None" = None
    process_group: ProcessGroup | None = None
    alone: ProcessGroup | None = None
    shares_heads: bool = False
    lists_by_heads: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.members:
            raise ValueError(f"member {self.member}: the group has 0 to {self.members - 1}")


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceSlice:
    """The blocks of a packed sequence that this rank holds. Built once per micro-batch.

    Each block lies whole on one member of the group. A member keeps its blocks in the order of the
    sequence. Arrays are on the host; tensors are int64 on ``device`` where not said otherwise.

    Attributes:
        cu_seqlens: document boundaries of the sequence in tokens, S + 1 entries from 0.
        owner_N: int64, the member that holds a block; each member holds at least one.
        ranks: of a segment (:mod:`.earlier_segments`), the ranks that share it. The sequence is
            then the one so far, and its members are what each rank holds of each segment: segment
            by segment, rank by rank.
        pad_to_multiple_of: tokens that what this rank computes must divide by.
    """

    cu_seqlens: tuple[int, ...]
    block_size: int
    owner_N: np.ndarray
    group: SequenceGroup
    ranks: SequenceGroup | None = None
    pad_to_multiple_of: int = 1
    device: torch.device | str = "cpu"

    @classmethod
    def dealt(
        cls,
        cu_seqlens: Sequence[int],
        group: SequenceGroup,
        *,
        block_size: int,
        in_halves: bool = False,
        pad_to_multiple_of: int = 1,
        device: torch.device | str = "cpu",
    ) -> "SequenceSlice":
        """Deal the blocks of a sequence out in turn: block j belongs to member j mod ``members``.

        Every document is spread alike, and so is its work, whatever budget it gets.

        Args:
            in_halves: for dense attention in pieces: see :func:`dealt_owners`.

        Raises:
            ValueError: the sequence cannot be cut (:func:`..layout.block_grid`), or has fewer
                blocks than the group has members.
        """
        grid = block_grid(cu_seqlens, block_size)
        return cls(
            cu_seqlens=tuple(map(int, cu_seqlens)),
            block_size=block_size,
            owner_N=dealt_owners(grid, slice(None), group.members, in_halves=in_halves),
            group=group,
            pad_to_multiple_of=pad_to_multiple_of,
            device=device,
        )

    def __post_init__(self) -> None:
        blocks, members = len(self._grid.start_N), self.group.members
        blocks_W = np.bincount(self.owner_N, minlength=members)
        if len(self.owner_N) != blocks or len(blocks_W) > members:
            raise ValueError(
                f"owner_N names members 0 to {len(blocks_W) - 1} for {len(self.owner_N)} blocks: "
                f"must name one of {members} for each of the sequence's {blocks} blocks"
            )
        if not blocks_W.all():
            raise ValueError(
                f"a sequence of {blocks} blocks on {members} members leaves none to member "
                f"{np.argmin(blocks_W)}: share it among at most {blocks}, or use smaller blocks"
            )

    @cached_property
    def blocks_W(self) -> tuple[np.ndarray, ...]:
        """For every member, the numbers in the sequence of its blocks; int64, rising."""
        return tuple(np.flatnonzero(self.owner_N == m) for m in range(self.group.members))

    @cached_property
    def tokens_W(self) -> tuple[np.ndarray, ...]:
        """For every member, the numbers in the sequence of its tokens; int64, rising."""
        owner_T = np.repeat(self.owner_N, self._grid.length_N)
        return tuple(np.flatnonzero(owner_T == m) for m in range(self.group.members))

    @cached_property
    def tokens_per_member(self) -> tuple[int, ...]:
        tokens_W = np.bincount(self.owner_N, self._grid.length_N, self.group.members)
        return tuple(tokens_W.astype(np.int64).tolist())

    @property
    def has_whole_documents(self) -> bool:
        """Whether this rank attends to whole documents, with all its heads or a part of them."""
        return self.ranks is None and (self.group.members == 1 or self.group.lists_by_heads)

    @property
    def segment(self) -> int:
        """Number of the segment that this is of; 0 where it is of none."""
        return 0 if self.ranks is None else self.group.member // self.ranks.members

    @cached_property
    def by_rank(self) -> "SequenceSlice":
        """All that this rank holds of the sequence so far, where this is of a segment."""
        assert self.ranks is not None
        owner_N = self.owner_N % self.ranks.members
        return replace(self, owner_N=owner_N, group=self.ranks, ranks=None)

    def leaves_to_all(self, documents: int) -> bool:
        """Whether every member has a block of the documents after so many first ones."""
        owner_N = self.owner_N[self._grid.blocks_S[:documents].sum() :]
        return bool(np.bincount(owner_N, minlength=self.group.members).all())

    def without(self, documents: int) -> "SequenceSlice":
        """The slice of all but the first documents; made once for each number."""
        if documents not in self._without:
            first = self._grid.first_block_S[documents]
            start = self.cu_seqlens[documents]
            self._without[documents] = replace(
                self,
                cu_seqlens=tuple(each - start for each in self.cu_seqlens[documents:]),
                owner_N=self.owner_N[first:],
                pad_to_multiple_of=1,
            )
        return self._without[documents]

    @cached_property
    def _without(self) -> "dict[int, SequenceSlice]":
        return {}

    @cached_property
    def pieces(self) -> dict[Any, Any]:
        """What :mod:`.pieces` has made of it."""
        return {}

    def rows_of(self, documents: int, *, by_token: bool) -> int:
        """Tokens of the first documents that this rank holds, or blocks."""
        if by_token:
            return int(np.searchsorted(self.tokens_T, self.cu_seqlens[documents]))
        blocks = int(self._grid.blocks_S[:documents].sum())
        return int(np.searchsorted(self.blocks_W[self.group.member], blocks))

    @cached_property
    def tokens_T(self) -> np.ndarray:
        """The numbers in the sequence of this rank's tokens."""
        held_N = self.owner_N == self.group.member
        return np.flatnonzero(np.repeat(held_N, self._grid.length_N))

    def cut(self, values_T: Tensor, padding: float = 0) -> Tensor:
        """This rank's part of a value per token, [T, ...], with ``padding`` behind it and in the
        place of values that ``values_T`` lacks at its end."""
        held_T = copied_to(torch.from_numpy(self.tokens_T), values_T.device)
        whole_T = _padded(values_T, self.cu_seqlens[-1] - len(values_T), padding)
        return _padded(whole_T.index_select(0, held_T), self.padding_tokens, padding)

    def whole(self, values_T: Tensor) -> Tensor:
        """A value per token of the sequence, from its members' parts, [T, ...]. A collective; a
        gradient flows to this rank's part alone."""
        own_T = values_T[: len(self.tokens_T)]
        if self.group.members == 1:
            return own_T
        own_T = _padded(own_T, max(self.tokens_per_member) - len(own_T), 0)
        parts = [torch.empty_like(own_T) for _ in range(self.group.members)]
        sent_T = own_T.detach().contiguous()
        torch.distributed.all_gather(parts, sent_T, group=self.group.process_group)
        parts[self.group.member] = own_T
        return torch.cat(parts).index_select(0, self.gathered_T.to(values_T.device))

    @property
    def padding_tokens(self) -> int:
        """Tokens of no document that this rank computes behind its own."""
        return -len(self.tokens_T) % self.pad_to_multiple_of

    @cached_property
    def positions_T(self) -> Tensor:
        """The place of each of this rank's tokens in its document, padding (0) included."""
        boundaries = self._grid.boundaries
        document_T = np.searchsorted(boundaries, self.tokens_T, side="right") - 1
        place_T = self.tokens_T - boundaries[document_T]
        return self.on_device(np.pad(place_T, (0, self.padding_tokens)))

    @cached_property
    def whole_layout(self) -> PackedLayout:
        """The blocks of the packed sequence."""
        return packed_layout(self.cu_seqlens, self.block_size, self.device)

    @cached_property
    def local_layout(self) -> PackedLayout:
        """The blocks of this rank, as a packed sequence of their own."""
        if self.group.members == 1:
            return self.whole_layout
        held = self.blocks_W[self.group.member]
        tokens_S = np.zeros(len(self.cu_seqlens) - 1, dtype=np.int64)
        np.add.at(tokens_S, self._grid.document_N[held], self._grid.length_N[held])
        boundaries = (0, *np.cumsum(tokens_S[tokens_S > 0]).tolist())
        return packed_layout(boundaries, self.block_size, self.device)

    @cached_property
    def layouts(self) -> LayoutPair:
        """The blocks of this rank's queries, and those of the sequence, which they read."""
        own_blocks = self.blocks_W[self.group.member].tolist()
        return LayoutPair.of_blocks(self.local_layout, self.whole_layout, own_blocks)

    @cached_property
    def gathered_T(self) -> Tensor:
        """For every token of the sequence, its place where the members' tokens lie one after the
        other, padded to as many as the longest has."""
        return self._gathered_places(self.tokens_W)

    @cached_property
    def gathered_N(self) -> Tensor:
        """Blocks' places, as :attr:`gathered_T`."""
        return self._gathered_places(self.blocks_W)

    @cached_property
    def _grid(self) -> BlockGrid:
        return block_grid(self.cu_seqlens, self.block_size)

    def _gathered_places(self, held_W: Sequence[np.ndarray]) -> Tensor:
        longest = max(map(len, held_W))
        places = np.empty(sum(map(len, held_W)), dtype=np.int64)
        for member, held in enumerate(held_W):
            places[held] = member * longest + np.arange(len(held))
        return self.on_device(places)

    def on_device(self, x: np.ndarray) -> Tensor:
        """A copy on the slice's device."""
        return copied_to(torch.from_numpy(x), self.device)


def dealt_owners(grid: BlockGrid, some: slice, members: int, *, in_halves: bool) -> np.ndarray:
    """int64, the member that gets each of some neighbouring blocks: one after the other in turn.

    In halves, a member gets at most two runs of a document, whose dense attention is an even part
    of the document's:

    1. The document is cut into 2 x ``members`` chunks of nearly equally many blocks.
    2. Chunk i and chunk i from the end are a pair. The larger a pair, the fewer tokens has the
       member so far that gets it.
    3. Where that leaves a member without a block, all get blocks in turn.
    """
    document_N, length_N = grid.document_N[some], grid.length_N[some]
    in_turn_N = np.arange(len(document_N), dtype=np.int64) % members
    if not in_halves:
        return in_turn_N
    owner_N, tokens_W = np.empty_like(in_turn_N), np.zeros(members, dtype=np.int64)
    starts = np.flatnonzero(np.diff(document_N, prepend=-1))
    for start, end in zip(starts, (*starts[1:], len(document_N)), strict=True):
        edges = start + np.arange(2 * members + 1) * (end - start) // (2 * members)
        token_edges = np.cumsum([0, *length_N[start:end]])[edges - start]
        chunk_tokens = np.diff(token_edges)
        pair_tokens_W = (chunk_tokens + chunk_tokens[::-1])[:members]
        member_W = np.empty(members, dtype=np.int64)
        member_W[np.argsort(-pair_tokens_W, kind="stable")] = np.argsort(tokens_W, kind="stable")
        owner_N[start:end] = np.repeat([*member_W, *member_W[::-1]], np.diff(edges))
        tokens_W[member_W] += pair_tokens_W
    return owner_N if np.bincount(owner_N, minlength=members).all() else in_turn_N


def _padded(values_T: Tensor, tokens: int, padding: float) -> Tensor:
    if not tokens:
        return values_T
    return torch.cat([values_T, values_T.new_full((tokens, *values_T.shape[1:]), padding)])


type Part = tuple[Tensor, Tensor, Selection]
"""Keys and values of some neighbouring KV heads, which are here, and the lists by which the slice's
queries read them."""


class SequenceExchange(Protocol):
    """Brings the keys and values that a slice's queries may read to this rank, and gradients back.

    All ranks that share the sequence call the functions in the same order. Autograd sees none of
    them.
    """

    def parts(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give all that the slice's queries may read, in parts of which each holds all that its
        query heads read, KV heads rising. ``selection`` is over the blocks of the sequence."""

    def gradient(
        self, parts: Iterable[Tensor], dtype: torch.dtype, sequence: SequenceSlice
    ) -> Tensor:
        """Sum all members' gradients of this slice's keys and values [T, G, E], in ``dtype`` at
        least. ``parts`` computes those of what :meth:`parts` gives, part after part."""

    def summaries(self, own: Sequence[Tensor], sequence: SequenceSlice) -> list[Tensor]:
        """Give the summaries of all blocks of the sequence, tensors of one entry per block."""

    def total_mass(self, mass_SK: Tensor, sequence: SequenceSlice) -> Tensor:
        """Add up what the queries of all slices found of every document's mass, float64; the same
        bits for each slice, so that budgets which follow from it are the same too."""
