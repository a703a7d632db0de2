# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks that share a sequence.

Shape legend: T tokens (of a slice or of the sequence), E keys and values side by side, Z tokens of
all members, padded to as many as the longest has.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.slice import Part, SequenceSlice


class AllGatherExchange:
    """Gathers keys and values, and reduce-scatters their gradients: a ``SequenceExchange``; one
    serves all sequences and layers of a group.

    Each KV head takes one all-gather forward; backward one all-gather and one reduce-scatter, in
    float32 (float64 for float64 inputs) and in an order that is the same each time. The next head
    is in flight while attention of this one is computed, so a member holds two heads at a time. As
    in Llama 3 (arXiv:2407.21783, section 3.3.2), without its bounds on layouts.
    """

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

    def parts(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give the sequence's keys and values, of one KV head after the other."""
        kv_heads = k_TGD.shape[1]
        in_flight = self._gather(k_TGD[:, 0], v_TGF[:, 0], sequence)
        for head in range(kv_heads):
            received_ZE, work, _ = in_flight
            # On CUDA the stream waits, not the host.
            work.wait()
            kv_TE = received_ZE.index_select(0, sequence.gathered_T)
            if head + 1 < kv_heads:
                in_flight = self._gather(k_TGD[:, head + 1], v_TGF[:, head + 1], sequence)
            k_head_TGD, v_head_TGF = kv_TE[:, None].split([k_TGD.shape[2], v_TGF.shape[2]], 2)
            yield k_head_TGD, v_head_TGF, selection.of_head(head, kv_heads)

    def gradient(
        self, parts: Iterable[Tensor], dtype: torch.dtype, sequence: SequenceSlice
    ) -> Tensor:
        """Sum members' gradients head by head, one in flight while the next is computed."""
        longest, heads = max(sequence.tokens_per_member), []
        in_flight: list[tuple[Tensor, dist.Work, Tensor]] = []

        def receive() -> None:
            while in_flight:
                received_TGE, work, _ = in_flight.pop()
                work.wait()
                heads.append(received_TGE[: len(sequence.tokens_T)].to(dtype))

        for dkv_TGE in parts:
            receive()
            shape = dkv_TGE.shape[1:]
            sent = dkv_TGE.new_empty(sequence.group.members * longest, *shape)
            sent.index_copy_(0, sequence.gathered_T, dkv_TGE)
            received = sent.new_empty(longest, *shape)
            work = dist.reduce_scatter_tensor(received, sent, group=self._group, async_op=True)
            assert work is not None, "this rank is outside the process group"
            in_flight.append((received, work, sent))
        receive()
        return torch.cat(heads, 1)

    def _gather(
        self, k_TD: Tensor, v_TF: Tensor, sequence: SequenceSlice
    ) -> tuple[Tensor, dist.Work, Tensor]:
        """What is received once the transfer ends, which keeps what is sent until then."""
        (tokens, key_dim), (_, value_dim) = k_TD.shape, v_TF.shape
        longest = max(sequence.tokens_per_member)
        # What lies past the end of a member with fewer tokens travels, and is not read.
        sent = k_TD.new_empty(longest, key_dim + value_dim)
        torch.cat((k_TD, v_TF), 1, out=sent[:tokens])
        received_ZE = k_TD.new_empty(sequence.group.members * longest, key_dim + value_dim)
        work = dist.all_gather_into_tensor(received_ZE, sent, self._group, async_op=True)
        assert work is not None, "this rank is outside the process group"
        return received_ZE, work, sent
