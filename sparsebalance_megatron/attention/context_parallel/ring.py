# SPDX-License-Identifier: Apache-2.0
"""Keys and values go round in a ring: a member never holds more than two members' rows.

After Ring Attention (arXiv:2310.01889): the next row is in flight while attention to this one is
computed. In the backward pass keys and values go round again, and their gradients follow them.

Shape legend: T tokens of a member's row, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.neighbours import Ring, RingSum, travelling
from sparsebalance_megatron.attention.context_parallel.parts import attend, attend_backward
from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.kernel import Kernel
from sparsebalance_megatron.attention.selection import Selection


class RingExchange:
    """One ring over all members; an :class:`.exchange.Exchange`.

    With W members the forward pass has W - 1 transfers one after the other, the backward pass
    W - 1 of keys and values and W of their gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ring = Ring.of(group)

    @property
    def member(self) -> int:
        return self._ring.rank

    @property
    def members(self) -> int:
        return self._ring.size

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
        visits = travelling(
            torch.stack((k_TGD, v_TGD), 1), self._ring, shard.owners.tokens_per_member
        )
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
            travelling(torch.stack((k_TGD, v_TGD), 1), self._ring, tokens),
            out_THD,
            lse_TH,
            selection,
            RingSum(self._ring, tokens),
            shard=shard,
            kernel=kernel,
            softmax_scale=softmax_scale,
        )
