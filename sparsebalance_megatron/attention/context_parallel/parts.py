# SPDX-License-Identifier: Apache-2.0
"""Attention over a packed row whose keys and values come one member's row at a time.

The LSE carries no gradient, so autograd must not see the parts: their backward passes take the
merged output and LSE, with which the parts' gradients add up to those of the whole.

Shape legend: T tokens of a member's row, H query heads, G KV heads, D head dim, N blocks, Q rows
and C heads that select, K places of a list, Y keys and values (2), W members of the context group,
X columns of a table (N + 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.kernel import Kernel, wide_dtype
from sparsebalance_megatron.attention.merge import merge_partials
from sparsebalance_megatron.attention.selection import ColumnLists, Selection

Visits = Iterator[tuple[int, Tensor]]
"""Members whose rows come by, each once and the own one first, with their kv_TYGD."""


class ReturningSum(Protocol):
    """Sums that follow the visits, and return to the members whose rows they belong to."""

    def add(self, x: Tensor) -> None:
        """Add what this member has for the row that is visiting."""

    def result(self) -> Tensor:
        """What all members have added for this member's row; after the last visit."""


def attend(
    q_THD: Tensor,
    visits: Visits,
    selection: Selection,
    *,
    shard: RowShard,
    kernel: Kernel,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the rows that come by; see :meth:`..kernel.Kernel.forward` for the results.

    Parts are merged in the order of the visits, in float32 (float64 for float64 inputs).
    """
    dtype = wide_dtype(q_THD.dtype)
    out_THD = torch.zeros_like(q_THD, dtype=dtype)
    lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=dtype, device=q_THD.device)
    for member, kv_TYGD in visits:
        k_TGD, v_TGD = kv_TYGD.unbind(1)
        part = part_of(selection, shard, member)
        results = kernel.forward(q_THD, k_TGD, v_TGD, part, softmax_scale=softmax_scale)
        out_THD, lse_TH = merge_partials(out_THD, lse_TH, *results)
    return out_THD.to(q_THD.dtype), lse_TH


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    visits: Visits,
    out_THD: Tensor,
    lse_TH: Tensor,
    selection: Selection,
    sums: ReturningSum,
    *,
    shard: RowShard,
    kernel: Kernel,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this member's q, k and v in their dtype; what crosses members is in float32."""
    dtype = wide_dtype(q_THD.dtype)
    dq_THD = torch.zeros_like(q_THD, dtype=dtype)
    for member, kv_TYGD in visits:
        k_TGD, v_TGD = kv_TYGD.unbind(1)
        part = part_of(selection, shard, member)
        dq_part_THD, dk_TGD, dv_TGD = kernel.backward(
            dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH, part, softmax_scale=softmax_scale
        )
        dq_THD += dq_part_THD
        sums.add(torch.stack((dk_TGD, dv_TGD), 1).to(dtype))
    dk_TGD, dv_TGD = sums.result().to(q_THD.dtype).unbind(1)
    return dq_THD.to(q_THD.dtype), dk_TGD, dv_TGD


def part_of(selection: Selection, shard: RowShard, member: int) -> Selection:
    """The part of a selection that a member's row holds; what the lists name keeps its order.

    The device is not read: lists are as wide as any may become, ``counts_QC`` says how long each
    is.
    """
    layout = shard.member_layouts[member]
    indices_QCK, counts_QC = _held_of(
        *(selection.indices_QCK, selection.counts_QC, shard.local_block_WX[member]),
        most=layout.max_blocks,
    )
    columns = selection.columns
    if columns is not None:
        tokens_NGK, counts_NG = _held_of(
            *(columns.tokens_NGK, columns.counts_NG, shard.local_token_WX[member]),
            most=layout.tokens,
        )
        columns = ColumnLists(tokens_NGK=tokens_NGK, counts_NG=counts_NG)
    own = shard.local_layout.number_N
    return Selection(
        indices_QCK=indices_QCK,
        counts_QC=counts_QC,
        columns=columns,
        by_token=selection.by_token,
        query_layout=selection.query_layout,
        kv_layout=layout,
        own_block_N=own if member == shard.member else torch.full_like(own, -1),
    )


def _held_of(
    lists_QCK: Tensor, counts_QC: Tensor, table_X: Tensor, *, most: int
) -> tuple[Tensor, Tensor]:
    """What of lists a member holds, by its own numbers and in the lists' order; and how much.

    Args:
        table_X: a member's number of what the lists name, -1 where it does not hold it, and in the
            last place.
        most: entries of one list that a member can hold.
    """
    places = lists_QCK.shape[2]
    width = min(places, most)
    past_end_QCK = torch.arange(places, device=table_X.device) >= counts_QC[..., None]
    listed_QCK = lists_QCK.masked_fill(past_end_QCK, table_X.shape[0] - 1)
    local_QCK = table_X.index_select(0, listed_QCK.flatten()).view(listed_QCK.shape)
    held_QCK = local_QCK >= 0
    # What the member does not hold goes to a place of its own, which is cut off.
    place_QCK = held_QCK.cumsum(2, dtype=torch.int32).sub_(1).masked_fill_(~held_QCK, width)
    held_lists_QCK = local_QCK.new_full((*listed_QCK.shape[:2], width + 1), -1)
    held_lists_QCK.scatter_(2, place_QCK.long(), local_QCK)
    return held_lists_QCK[:, :, :width].contiguous(), held_QCK.sum(2, dtype=torch.int32)
