# SPDX-License-Identifier: Apache-2.0
"""Attention of one member's queries over a packed row that lies on several ranks.

Shape legend: T tokens of a member's row, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from sparsebalance_megatron.attention.api import (
    block_sparse_attention,
    check_known,
    checked_kernel,
)
from sparsebalance_megatron.attention.autograd import Attention
from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.kernel import Kernel
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import AttentionImplementation


class Exchange(Protocol):
    """How a member gets the keys and values that its queries read, and returns their gradients.

    It knows its process groups, and no row: one exchange serves all rows and layers of a group. All
    members call it in the same order. Autograd sees none of its functions.
    """

    @property
    def member(self) -> int:
        """This rank's number in the context group."""

    @property
    def members(self) -> int:
        """Ranks of the context group."""

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
        """Attend; all tensors are of this member's tokens, see :class:`..kernel.Kernel`.

        Args:
            selection: lists of this member's queries over the blocks of the packed row.
            shard: what this member holds.
            kernel: computes attention over the keys and values that are here.
        """

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
        """Gradients of this member's q, k and v, from the queries of all members."""


def exchanged_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    selection: Selection,
    *,
    shard: RowShard,
    exchange: Exchange | None,
    softmax_scale: float,
    implementation: AttentionImplementation = "auto",
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`..api.block_sparse_attention` over a packed row of which this rank holds a share.

    All members of the context group call it at the same place of their programs. Its results are
    those of one rank that holds the row, to rounding, and the same bits each time. A context group
    of one member takes the call without exchange, and its bits.

    Args:
        q_THD, k_TGD, v_TGD: of this member's row, in the order of its tokens.
        selection: lists of this member's queries over the blocks of the packed row, see
            :meth:`.shard.RowShard.selection`.
        shard: what this member holds.
        exchange: how keys and values travel; of no use to a context group of one member.
        softmax_scale, implementation: see :func:`..api.block_sparse_attention`.
        known: likewise; all members give it, or none, since the exchange of a forward is left out.

    Returns:
        out_THD and lse_TH of this member's queries.

    Raises:
        ValueError: as :func:`..api.block_sparse_attention`; or the selection or the exchange
            belongs to another shard.
    """
    _check_selection(selection, shard)
    if shard.members == 1:
        return block_sparse_attention(
            q_THD,
            k_TGD,
            v_TGD,
            selection,
            softmax_scale=softmax_scale,
            implementation=implementation,
            known=known,
        )
    if exchange is None or (exchange.member, exchange.members) != (shard.member, shard.members):
        found = f"member {exchange.member} of {exchange.members}" if exchange else "none"
        raise ValueError(
            f"exchanged_attention: the shard is that of member {shard.member} of {shard.members}, "
            f"the exchange is {found}: build both for the same process group"
        )
    # What is checked are the tensors that are here.
    here = replace(selection, kv_layout=shard.local_layout)
    kernel = checked_kernel(q_THD, k_TGD, v_TGD, here, implementation)
    over_members = _OverMembers(exchange=exchange, shard=shard, kernel=kernel)
    if known is not None:
        check_known(q_THD, known)
    return Attention.apply(q_THD, k_TGD, v_TGD, selection, softmax_scale, over_members, known)


@dataclass(frozen=True, kw_only=True)
class _OverMembers:
    """An exchange as the kernel of :class:`..autograd.Attention`."""

    exchange: Exchange
    shard: RowShard
    kernel: Kernel

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        return self.exchange.forward(
            q_THD,
            k_TGD,
            v_TGD,
            selection,
            shard=self.shard,
            kernel=self.kernel,
            softmax_scale=softmax_scale,
        )

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
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.exchange.backward(
            dout_THD,
            q_THD,
            k_TGD,
            v_TGD,
            out_THD,
            lse_TH,
            selection,
            shard=self.shard,
            kernel=self.kernel,
            softmax_scale=softmax_scale,
        )

    def obstacle(self, q_THD: Tensor, selection: Selection) -> str | None:
        return self.kernel.obstacle(q_THD, selection)


def _check_selection(selection: Selection, shard: RowShard) -> None:
    layouts = selection.query_layout, selection.kv_layout
    if layouts[0] is not shard.local_layout or layouts[1] is not shard.row_layout:
        raise ValueError(
            "exchanged_attention: the selection was not made for this shard, whose local_layout "
            "and row_layout are to be its layouts: make it by RowShard.selection or "
            "RowShard.local_selection of the same shard"
        )
