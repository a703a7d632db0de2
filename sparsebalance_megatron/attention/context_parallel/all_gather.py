# SPDX-License-Identifier: Apache-2.0
"""Every member gathers the keys and values of the row, one KV head at a time.

The next head is in flight while attention of this one is computed, so a member holds two heads of
the row at a time. Nobody waits for the work of another member between heads, as members of a ring
do. As in Llama 3 (arXiv:2407.21783, section 3.3.2), without its bounds on layouts.

Shape legend: T tokens (of a member's row or of the packed row), H query heads, G KV heads, D head
dim, Y keys and values (2), Z tokens of all members' rows padded to the longest, E query heads of a
KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.kernel import Kernel, wide_dtype
from sparsebalance_megatron.attention.selection import ColumnLists, Selection


class AllGatherExchange:
    """Gathers keys and values, and reduce-scatters their gradients; an :class:`.exchange.Exchange`.

    Each KV head takes one all-gather forward; backward one all-gather and one reduce-scatter, in
    float32 (float64 for float64 inputs) and in the order that the process group sums in, which is
    the same each time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._member, self._members = dist.get_rank(group), dist.get_world_size(group)

    @property
    def member(self) -> int:
        return self._member

    @property
    def members(self) -> int:
        return self._members

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        *,
        shard: RowShard,
        kernel: Kernel,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`.exchange.Exchange.forward`."""
        out_THD = torch.empty_like(q_THD)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype), device=q_THD.device)
        for head, row in enumerate(self._heads(k_TGD, v_TGD, shard)):
            heads, one = _one_head(selection, head, k_TGD.shape[1], q_THD.shape[1])
            out_THD[:, heads], lse_TH[:, heads] = kernel.forward(
                q_THD[:, heads], row.k_TGD, row.v_TGD, one, softmax_scale=softmax_scale
            )
        return out_THD, lse_TH

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        selection: Selection,
        *,
        shard: RowShard,
        kernel: Kernel,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`.exchange.Exchange.backward`."""
        dq_THD, dk_TGD, dv_TGD = (torch.empty_like(x) for x in (q_THD, k_TGD, v_TGD))
        in_flight: _InFlight | None = None

        for head, row in enumerate(self._heads(k_TGD, v_TGD, shard)):
            heads, one = _one_head(selection, head, k_TGD.shape[1], q_THD.shape[1])
            dq_THD[:, heads], dk_row_TGD, dv_row_TGD = kernel.backward(
                dout_THD[:, heads],
                q_THD[:, heads],
                row.k_TGD,
                row.v_TGD,
                out_THD[:, heads],
                lse_TH[:, heads],
                one,
                softmax_scale=softmax_scale,
            )
            if in_flight is not None:
                in_flight.receive(dk_TGD[:, head - 1], dv_TGD[:, head - 1])
            in_flight = self._scatter(torch.cat((dk_row_TGD, dv_row_TGD), 1), shard)
        assert in_flight is not None
        in_flight.receive(dk_TGD[:, -1], dv_TGD[:, -1])
        return dq_THD, dk_TGD, dv_TGD

    def _heads(self, k_TGD: Tensor, v_TGD: Tensor, shard: RowShard) -> Iterator[_HeadOfRow]:
        """The packed row's keys and values, of one head after the other."""
        in_flight = self._gather(k_TGD[:, 0], v_TGD[:, 0], shard)
        for head in range(k_TGD.shape[1]):
            kv_TYD = in_flight.wait().index_select(0, shard.slot_T)
            if head + 1 < k_TGD.shape[1]:
                in_flight = self._gather(k_TGD[:, head + 1], v_TGD[:, head + 1], shard)
            k_head_TGD, v_head_TGD = kv_TYD.split(1, dim=1)
            yield _HeadOfRow(k_TGD=k_head_TGD, v_TGD=v_head_TGD)

    def _gather(self, k_TD: Tensor, v_TD: Tensor, shard: RowShard) -> _InFlight:
        tokens, head_dim = k_TD.shape
        longest = max(shard.owners.tokens_per_member)
        # What lies past a shorter row's end travels, and is not read.
        sent = k_TD.new_empty(longest, 2, head_dim)
        torch.stack((k_TD, v_TD), 1, out=sent[:tokens])
        received_ZYD = k_TD.new_empty(self.members * longest, 2, head_dim)
        work = dist.all_gather_into_tensor(received_ZYD, sent, self._group, async_op=True)
        return _InFlight(sent=sent, received=received_ZYD, work=work)

    def _scatter(self, dkv_TYD: Tensor, shard: RowShard) -> _InFlight:
        """Start to add the gradients of the packed row up, each member's for itself."""
        longest = max(shard.owners.tokens_per_member)
        shape = dkv_TYD.shape[1:]
        dtype = wide_dtype(dkv_TYD.dtype)
        sent_ZYD = dkv_TYD.new_empty(self.members * longest, *shape, dtype=dtype)
        sent_ZYD.index_copy_(0, shard.slot_T, dkv_TYD.to(dtype))
        received = sent_ZYD.new_empty(longest, *shape)
        work = dist.reduce_scatter_tensor(received, sent_ZYD, group=self._group, async_op=True)
        return _InFlight(sent=sent_ZYD, received=received, work=work)


@dataclass(frozen=True, kw_only=True)
class _HeadOfRow:
    """Keys and values of the packed row; G is 1."""

    k_TGD: Tensor
    v_TGD: Tensor


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """A collective under way; it holds what is sent until it has been."""

    sent: Tensor
    received: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result; on CUDA the stream waits, not the host."""
        assert self.work is not None, "this rank is outside the process group"
        self.work.wait()
        return self.received

    def receive(self, dk_TD: Tensor, dv_TD: Tensor) -> None:
        """Write gradients of this member's tokens where they belong."""
        dkv_TYD = self.wait()[: dk_TD.shape[0]]
        dk_TD.copy_(dkv_TYD[:, 0])
        dv_TD.copy_(dkv_TYD[:, 1])


def _columns_of_head(columns: ColumnLists | None, head: int) -> ColumnLists | None:
    if columns is None:
        return None
    one = slice(head, head + 1)
    return ColumnLists(tokens_NGK=columns.tokens_NGK[:, one], counts_NG=columns.counts_NG[:, one])


def _one_head(
    selection: Selection, head: int, kv_heads: int, query_heads: int
) -> tuple[slice, Selection]:
    """The query heads of a KV head, and the lists that they read by."""
    lists = selection.counts_QC.shape[1] // kv_heads
    some = slice(head * lists, (head + 1) * lists)
    one = replace(
        selection,
        indices_QCK=selection.indices_QCK[:, some],
        counts_QC=selection.counts_QC[:, some],
        columns=_columns_of_head(selection.columns, head),
    )
    group = query_heads // kv_heads
    return slice(head * group, (head + 1) * group), one
