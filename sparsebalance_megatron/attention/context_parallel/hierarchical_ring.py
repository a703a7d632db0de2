# SPDX-License-Identifier: Apache-2.0
"""A ring of rings: slow links are crossed once for every inner ring, and while it turns.

After the double ring of LoongTrain (arXiv:2406.18485): the row that will start the next inner ring
is in flight between nodes during the whole of this one.

Shape legend: T tokens of a member's row, H query heads, G KV heads, D head dim, Y keys and values
(2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.neighbours import Ring, RingSum, travelling
from sparsebalance_megatron.attention.context_parallel.parts import (
    Visits,
    attend,
    attend_backward,
)
from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.kernel import Kernel
from sparsebalance_megatron.attention.selection import Selection


class HierarchicalRingExchange:
    """Inner rings of neighbours inside an outer ring; an :class:`.exchange.Exchange`.

    Members are numbered through the inner groups: member = outer rank x inner members + inner rank.

    Args:
        inner: this rank's neighbours, as a rule those of its node.
        outer: the ranks with this rank's place in every inner group. It needs a communicator of its
            own, so that its transfers do not queue behind those of the inner ring.
    """

    def __init__(self, *, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self._inner, self._outer = Ring.of(inner), Ring.of(outer)

    @property
    def member(self) -> int:
        return self._outer.rank * self._inner.size + self._inner.rank

    @property
    def members(self) -> int:
        return self._outer.size * self._inner.size

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
        visits = self._visits(torch.stack((k_TGD, v_TGD), 1), shard.owners.tokens_per_member)
        return attend(
            q_THD, visits, selection, shard=shard, kernel=kernel, softmax_scale=softmax_scale
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
        shard: RowShard,
        kernel: Kernel,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`.exchange.Exchange.backward`."""
        tokens = shard.owners.tokens_per_member
        return attend_backward(
            dout_THD,
            q_THD,
            self._visits(torch.stack((k_TGD, v_TGD), 1), tokens),
            out_THD,
            lse_TH,
            selection,
            _NestedSum(self._inner, self._outer, tokens),
            shard=shard,
            kernel=kernel,
            softmax_scale=softmax_scale,
        )

    def _visits(self, kv_TYGD: Tensor, tokens: Sequence[int]) -> Visits:
        size = self._inner.size
        starts = travelling(kv_TYGD, self._outer, _across(tokens, self._inner))
        for outer_member, start_TYGD in starts:
            inside = tokens[outer_member * size : (outer_member + 1) * size]
            for inner_member, visiting_TYGD in travelling(start_TYGD, self._inner, inside):
                yield outer_member * size + inner_member, visiting_TYGD


class _NestedSum:
    """A sum round every inner ring, and their sum round the outer ring; a ``ReturningSum``."""

    def __init__(self, inner: Ring, outer: Ring, tokens: Sequence[int]) -> None:
        self._inner, self._outer, self._tokens = inner, outer, tokens
        self._outer_sum = RingSum(outer, _across(tokens, inner))
        self._additions = 0
        self._inner_sum = self._next_inner_sum()

    def add(self, x: Tensor) -> None:
        self._inner_sum.add(x)
        self._additions += 1
        if self._additions % self._inner.size == 0:
            self._outer_sum.add(self._inner_sum.result())
            self._inner_sum = self._next_inner_sum()

    def result(self) -> Tensor:
        return self._outer_sum.result()

    def _next_inner_sum(self) -> RingSum:
        size = self._inner.size
        outer_member = (self._outer.rank - self._additions // size) % self._outer.size
        return RingSum(self._inner, self._tokens[outer_member * size : (outer_member + 1) * size])


def _across(tokens: Sequence[int], inner: Ring) -> Sequence[int]:
    """Tokens of the members with this rank's place in every inner group."""
    return tokens[inner.rank :: inner.size]
