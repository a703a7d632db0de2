# SPDX-License-Identifier: Apache-2.0
"""Collectives of all exchanges between ranks: summaries and masses of members, transfers in flight.

Shape legend: N blocks (of a slice or of the sequence), S documents of the sequence, K budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.sequence.slice import SequenceSlice


class BetweenRanks:
    """The part of an :class:`.slice.SequenceExchange` that does not move keys and values.

    One exchange serves all sequences and layers of a process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.no_grad()
    def summaries(self, own: Sequence[Tensor], sequence: SequenceSlice) -> list[Tensor]:
        """See :meth:`.slice.SequenceExchange.summaries`; one collective.

        Raises:
            ValueError: a summary has not one entry for each of this rank's blocks.
        """
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
        """See :meth:`.slice.SequenceExchange.total_mass`; one collective.

        Raises:
            ValueError: the masses are not float64, or not of the sequence's documents.
        """
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
