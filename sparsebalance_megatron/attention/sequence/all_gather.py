# SPDX-License-Identifier: Apache-2.0
"""Every member gathers the keys and values of the sequence, one KV head at a time.

The next head is in flight while attention of this one is computed, so a member holds two heads of
the sequence at a time. Between heads no member waits for what others compute, as in a ring. As in
Llama 3 (arXiv:2407.21783, section 3.3.2), without its bounds on layouts.

Shape legend: T tokens (of a slice or of the sequence), G KV heads, D head dim, Y keys and values
(2), Z tokens of all members, padded to as many as the longest has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.between_ranks import BetweenRanks, InFlight
from sparsebalance_megatron.attention.sequence.slice import Part, SequenceSlice


class AllGatherExchange(BetweenRanks):
    """Gathers keys and values, and reduce-scatters their gradients: a ``SequenceExchange``.

    Each KV head takes one all-gather forward; backward one all-gather and one reduce-scatter, in
    float32 (float64 for float64 inputs) and in the order that the process group sums in, which is
    the same each time.
    """

    gives_whole_heads = True

    def parts(
        self, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give the sequence's keys and values, of one KV head after the other."""
        kv_heads = k_TGD.shape[1]
        in_flight = self._gather(k_TGD[:, 0], v_TGD[:, 0], sequence)
        for head in range(kv_heads):
            kv_TYD = in_flight.wait().index_select(0, sequence.gathered_T)
            if head + 1 < kv_heads:
                in_flight = self._gather(k_TGD[:, head + 1], v_TGD[:, head + 1], sequence)
            k_head_TGD, v_head_TGD = kv_TYD.split(1, dim=1)
            yield Part(
                k_TGD=k_head_TGD,
                v_TGD=v_head_TGD,
                selection=selection.of_head(head, kv_heads),
                kv_head=head,
            )

    def gradients(self, k_TGD: Tensor, sequence: SequenceSlice) -> _ScatteredHeads:
        """See :meth:`.slice.SequenceExchange.gradients`."""
        return _ScatteredHeads(self._group, k_TGD, sequence)

    def _gather(self, k_TD: Tensor, v_TD: Tensor, sequence: SequenceSlice) -> InFlight:
        tokens, head_dim = k_TD.shape
        longest = max(sequence.tokens_per_member)
        # What lies past the end of a member with fewer tokens travels, and is not read.
        sent = k_TD.new_empty(longest, 2, head_dim)
        torch.stack((k_TD, v_TD), 1, out=sent[:tokens])
        received_ZYD = k_TD.new_empty(sequence.group.members * longest, 2, head_dim)
        work = dist.all_gather_into_tensor(received_ZYD, sent, self._group, async_op=True)
        assert work is not None, "this rank is outside the process group"
        return InFlight(sent=sent, received=received_ZYD, works=[work])


class _ScatteredHeads:
    """Adds members' gradients up head by head, each member's for itself: a ``GradientSum``.

    One head's sum is in flight while the next head's gradients are computed.
    """

    def __init__(self, group: dist.ProcessGroup, k_TGD: Tensor, sequence: SequenceSlice) -> None:
        self._group, self._sequence = group, sequence
        tokens, *heads = k_TGD.shape
        self._dkv_TYGD = k_TGD.new_empty(tokens, 2, *heads)
        self._received_heads = 0
        self._in_flight: InFlight | None = None

    def add(self, dkv_TYGD: Tensor) -> None:
        self._receive()
        longest = max(self._sequence.tokens_per_member)
        shape = dkv_TYGD.shape[1:]
        sent = dkv_TYGD.new_empty(self._sequence.group.members * longest, *shape)
        sent.index_copy_(0, self._sequence.gathered_T, dkv_TYGD)
        received = sent.new_empty(longest, *shape)
        work = dist.reduce_scatter_tensor(received, sent, group=self._group, async_op=True)
        assert work is not None, "this rank is outside the process group"
        self._in_flight = InFlight(sent=sent, received=received, works=[work])

    def result(self) -> Tensor:
        self._receive()
        return self._dkv_TYGD

    def _receive(self) -> None:
        if self._in_flight is not None:
            head_T = self._dkv_TYGD[:, :, self._received_heads]
            head_T.copy_(self._in_flight.wait()[: len(head_T), :, 0])
            self._received_heads += 1
            self._in_flight = None
