# SPDX-License-Identifier: Apache-2.0
"""A ring of ranks: every member sends to the next one and receives from the one before.

Shape legend: T tokens of a member's row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

_VISITING, _RETURNING = 0, 1
"""Tags, so that what goes round and the sums that follow it are not taken for one another."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A transfer under way. What is sent must not change before :meth:`wait`."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What the member before has sent; on CUDA the stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The members of a process group in a circle."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ring:
        """The ring of a group that this rank belongs to."""
        return cls(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))

    def pass_on(self, x: Tensor, receive_tokens: int, tag: int) -> InFlight:
        """Send ``x`` to the next member, and receive its like, of ``receive_tokens`` rows.

        In a ring of one member nothing is sent: it receives ``x`` itself.
        """
        sent = x.contiguous()
        if self.size == 1:
            return InFlight(sent=sent, received=sent, works=[])
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


def travelling(x_T: Tensor, ring: Ring, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Every member's ``x_T``, with the member it came from: the own one first, then backwards.

    The next is in flight while the caller works on one.

    Args:
        x_T: this member's.
        ring: the members; each must run through all of them.
        tokens: T of every member.
    """
    for hop in range(ring.size):
        member = (ring.rank - hop) % ring.size
        if hop == ring.size - 1:
            yield member, x_T
            return
        in_flight = ring.pass_on(x_T, tokens[(member - 1) % ring.size], _VISITING)
        yield member, x_T
        x_T = in_flight.wait()


class RingSum:
    """Sums that follow what is :func:`travelling`: what members add for one comes back to it.

    A sum begins with the member that it is for; the others add in the order of the ring.
    """

    def __init__(self, ring: Ring, tokens: Sequence[int]) -> None:
        self._ring, self._tokens = ring, tokens
        self._member = ring.rank
        self._in_flight: InFlight | None = None

    def add(self, x_T: Tensor) -> None:
        """Add to the sum of the member that is visiting, and send it on."""
        if self._in_flight is not None:
            x_T = self._in_flight.wait().add_(x_T)
        self._member = (self._member - 1) % self._ring.size
        self._in_flight = self._ring.pass_on(x_T, self._tokens[self._member], _RETURNING)

    def result(self) -> Tensor:
        """The sum for this member, after one addition for every member."""
        assert self._in_flight is not None
        return self._in_flight.wait()
