# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the ranks that share a sequence: an all-gather, a ring, and a ring of rings.

Shape legend: T tokens (of a slice or of the sequence), N blocks of them, E keys and values side by
side, Z tokens of all members, padded to as many as the longest has, W members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.exchange import held_by
from sparsebalance_megatron.attention.sequence.slice import Part, SequenceSlice

_VISITING, _RETURNING = 0, 1
"""Tags, so that what goes round and the sums that follow it are not taken for one another."""


class BetweenRanks:
    """What an all-gather and rings share; one serves all sequences and layers of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.no_grad()
    def summaries(self, own: Sequence[Tensor], sequence: SequenceSlice) -> list[Tensor]:
        """See :meth:`.slice.SequenceExchange.summaries`; one collective."""
        blocks = sequence.local_layout.blocks
        if any(x.shape[0] != blocks for x in own):
            raise ValueError(
                f"summaries have shapes {', '.join(str(tuple(x.shape)) for x in own)}: must have "
                f"one entry for each of the slice's {blocks} blocks"
            )
        # As bytes, summaries of different dtypes travel together.
        columns = [x.reshape(blocks, -1).contiguous().view(torch.uint8) for x in own]
        sizes = [column.shape[1] for column in columns]
        most = max(map(len, sequence.blocks_W))
        # What lies past the end of a member with fewer blocks travels, and is not read.
        sent = columns[0].new_empty(most, sum(sizes))
        torch.cat(columns, 1, out=sent[:blocks])
        received = sent.new_empty(sequence.group.members * most, sum(sizes))
        dist.all_gather_into_tensor(received, sent, self._group)
        whole = received.index_select(0, sequence.gathered_N)
        return [
            # A copy begins where its dtype may; a slice may not.
            column.clone(memory_format=torch.contiguous_format).view(x.dtype).view(-1, *x.shape[1:])
            for column, x in zip(whole.split(sizes, 1), own, strict=True)
        ]

    @torch.no_grad()
    def total_mass(self, mass_SK: Tensor, sequence: SequenceSlice) -> Tensor:
        """See :meth:`.slice.SequenceExchange.total_mass`; one collective."""
        if mass_SK.dtype != torch.float64 or mass_SK.shape[0] != sequence.whole_layout.documents:
            raise ValueError(
                f"mass is {mass_SK.dtype} {tuple(mass_SK.shape)}: must be float64 with one entry "
                f"for each of the sequence's {sequence.whole_layout.documents} documents"
            )
        total_SK = mass_SK.clone()
        dist.all_reduce(total_SK, group=self._group)
        return total_SK


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Transfers under way. What is sent must not change before :meth:`wait`."""

    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        """Received tensors; on CUDA the stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


class AllGatherExchange(BetweenRanks):
    """Gathers keys and values, and reduce-scatters their gradients: a ``SequenceExchange``.

    Each KV head takes one all-gather forward; backward one all-gather and one reduce-scatter, in
    float32 (float64 for float64 inputs) and in an order that is the same each time. The next head
    is in flight while attention of this one is computed, so a member holds two heads at a time. As
    in Llama 3 (arXiv:2407.21783, section 3.3.2), without its bounds on layouts.
    """

    gives_whole_heads = True

    def parts(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give the sequence's keys and values, of one KV head after the other."""
        kv_heads = k_TGD.shape[1]
        in_flight = self._gather(k_TGD[:, 0], v_TGF[:, 0], sequence)
        for head in range(kv_heads):
            kv_TE = in_flight.wait().index_select(0, sequence.gathered_T)
            if head + 1 < kv_heads:
                in_flight = self._gather(k_TGD[:, head + 1], v_TGF[:, head + 1], sequence)
            k_head_TGD, v_head_TGF = kv_TE[:, None].split([k_TGD.shape[2], v_TGF.shape[2]], 2)
            yield Part(
                k_TGD=k_head_TGD,
                v_TGF=v_head_TGF,
                selection=selection.of_head(head, kv_heads),
                kv_head=head,
            )

    def gradients(self, dtype: torch.dtype, sequence: SequenceSlice) -> _ScatteredHeads:
        return _ScatteredHeads(self._group, dtype, sequence)

    def _gather(self, k_TD: Tensor, v_TF: Tensor, sequence: SequenceSlice) -> InFlight:
        (tokens, key_dim), (_, value_dim) = k_TD.shape, v_TF.shape
        longest = max(sequence.tokens_per_member)
        # What lies past the end of a member with fewer tokens travels, and is not read.
        sent = k_TD.new_empty(longest, key_dim + value_dim)
        torch.cat((k_TD, v_TF), 1, out=sent[:tokens])
        received_ZE = k_TD.new_empty(sequence.group.members * longest, key_dim + value_dim)
        work = dist.all_gather_into_tensor(received_ZE, sent, self._group, async_op=True)
        assert work is not None, "this rank is outside the process group"
        return InFlight(sent=sent, received=received_ZE, works=[work])


class _ScatteredHeads:
    """Sums members' gradients head by head, one in flight while the next is computed: a
    ``GradientSum``."""

    def __init__(
        self, group: dist.ProcessGroup, dtype: torch.dtype, sequence: SequenceSlice
    ) -> None:
        self._group, self._dtype, self._sequence = group, dtype, sequence
        self._heads: list[Tensor] = []
        self._in_flight: InFlight | None = None

    def add(self, dkv_TGE: Tensor) -> None:
        self._receive()
        longest = max(self._sequence.tokens_per_member)
        shape = dkv_TGE.shape[1:]
        sent = dkv_TGE.new_empty(self._sequence.group.members * longest, *shape)
        sent.index_copy_(0, self._sequence.gathered_T, dkv_TGE)
        received = sent.new_empty(longest, *shape)
        work = dist.reduce_scatter_tensor(received, sent, group=self._group, async_op=True)
        assert work is not None, "this rank is outside the process group"
        self._in_flight = InFlight(sent=sent, received=received, works=[work])

    def result(self) -> Tensor:
        self._receive()
        return torch.cat(self._heads, 1)

    def _receive(self) -> None:
        if self._in_flight is not None:
            own_TGE = self._in_flight.wait()[: len(self._sequence.tokens_T)]
            self._heads.append(own_TGE.to(self._dtype))
            self._in_flight = None


class RingExchange(BetweenRanks):
    """Sends keys and values round all members: a ``SequenceExchange``.

    After Ring Attention (arXiv:2310.01889): the next member's keys and values are in flight while
    attention to these is computed, so a member never holds more than two members' tokens; in the
    backward pass gradients follow them. After the double ring of LoongTrain (arXiv:2406.18485), a
    ring of rings crosses slow links once for every inner ring: what will start the next inner ring
    is in flight during the whole of this one.

    Args:
        group: all members.
        inner, outer: both for a ring of rings, or neither. ``inner`` holds this rank's neighbours,
            as a rule those of its node; ``outer`` the ranks with this rank's place in every inner
            group. Members are numbered through the inner groups. ``outer`` needs a communicator of
            its own, so that its transfers do not queue behind those of the inner ring.
    """

    gives_whole_heads = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        inner: dist.ProcessGroup | None = None,
        outer: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group)
        self._inner, self._outer = _Ring.of(inner or group), _Ring.of(outer)

    def parts(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give the members' keys and values: this rank's, then backwards round the ring."""
        inner, tokens_W = self._inner, sequence.tokens_per_member
        head_dims = [k_TGD.shape[2], v_TGF.shape[2]]
        kv_TGE, starting_W = torch.cat((k_TGD, v_TGF), 2), tokens_W[inner.rank :: inner.size]
        for outer_rank, start_TGE in self._outer.travelling(kv_TGE, starting_W):
            first = outer_rank * inner.size
            inside_W = tokens_W[first : first + inner.size]
            for inner_rank, visiting_TGE in inner.travelling(start_TGE, inside_W):
                k_visiting_TGD, v_visiting_TGF = visiting_TGE.split(head_dims, 2)
                yield Part(
                    k_TGD=k_visiting_TGD,
                    v_TGF=v_visiting_TGF,
                    selection=held_by(first + inner_rank, selection, sequence),
                )

    def gradients(self, dtype: torch.dtype, sequence: SequenceSlice) -> _SumOfSums:
        return _SumOfSums(self._inner, self._outer, sequence.tokens_per_member)


@dataclass(frozen=True, kw_only=True)
class _Ring:
    """The members of a process group in a circle: each sends to the next one."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Ring:
        """The ring of a group; without one, of this rank alone."""
        if group is None:
            return cls(group=None, rank=0, size=1)
        return cls(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))

    def pass_on(self, x: Tensor, receive_tokens: int, tag: int) -> InFlight:
        """Send ``x`` to the next member, and receive its like; alone, ``x`` itself."""
        sent = x.contiguous()
        if self.size == 1:
            return InFlight(sent=sent, received=sent, works=[])
        assert self.group is not None
        received = sent.new_empty(receive_tokens, *x.shape[1:])
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        operations = [
            dist.P2POp(dist.isend, sent, after, self.group, tag),
            dist.P2POp(dist.irecv, received, before, self.group, tag),
        ]
        works = dist.batch_isend_irecv(operations)
        return InFlight(sent=sent, received=received, works=works)

    def travelling(self, x_T: Tensor, tokens_W: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Give every member's ``x_T`` and the member it came from: the own, then backwards.

        The next is in flight while the caller works on one. Each member must run through all.
        """
        for hop in range(self.size):
            member = (self.rank - hop) % self.size
            if hop == self.size - 1:
                yield member, x_T
                return
            in_flight = self.pass_on(x_T, tokens_W[(member - 1) % self.size], _VISITING)
            yield member, x_T
            x_T = in_flight.wait()


class _RingSum:
    """Sums that follow what is travelling: what members add for one comes back to it.

    A sum begins with the member that it is for; the others add in the order of the ring.
    """

    def __init__(self, ring: _Ring, tokens_W: Sequence[int]) -> None:
        self._ring, self._tokens_W = ring, tokens_W
        self._member = ring.rank
        self._in_flight: InFlight | None = None

    def add(self, x_T: Tensor) -> None:
        if self._in_flight is not None:
            x_T = self._in_flight.wait().add_(x_T)
        self._member = (self._member - 1) % self._ring.size
        self._in_flight = self._ring.pass_on(x_T, self._tokens_W[self._member], _RETURNING)

    def result(self) -> Tensor:
        assert self._in_flight is not None
        return self._in_flight.wait()


class _SumOfSums:
    """A sum round every inner ring, and their sum round the outer one: a ``GradientSum``."""

    def __init__(self, inner: _Ring, outer: _Ring, tokens_W: Sequence[int]) -> None:
        self._inner, self._outer, self._tokens_W = inner, outer, tokens_W
        self._outer_sum = _RingSum(outer, tokens_W[inner.rank :: inner.size])
        self._additions = 0
        self._inner_sum = self._next_inner_sum()

    def add(self, dkv_TGE: Tensor) -> None:
        self._inner_sum.add(dkv_TGE)
        self._additions += 1
        if self._additions % self._inner.size == 0:
            self._outer_sum.add(self._inner_sum.result())
            self._inner_sum = self._next_inner_sum()

    def result(self) -> Tensor:
        return self._outer_sum.result()

    def _next_inner_sum(self) -> _RingSum:
        size = self._inner.size
        outer_rank = (self._outer.rank - self._additions // size) % self._outer.size
        first = outer_rank * size
        return _RingSum(self._inner, self._tokens_W[first : first + size])
