# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes that ranks share a sequence, between the ranks of this launch.

Import only after the CPU adapter has been installed where it is needed.

Shape legend: T tokens of a member's slice.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Attention, Saved, wide_dtype
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.exchange import ExchangingKernel
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.config import ExchangeName
from sparsebalance_megatron.cost.exchange import Exchange, received_bytes
from sparsebalance_megatron.cost.table import ExchangeRow
from sparsebalance_megatron.megatron.sequence_groups import make_sequence_groups
from sparsebalance_megatron.megatron.settings import RANKS_PER_NODE, head_dims
from sparsebalance_megatron.megatron.single_process import data_parallel_world, transformer_config
from sparsebalance_megatron.profile.cells import (
    Clock,
    Thoroughness,
    Timed,
    backward_from,
    median_and_spread,
    time_once,
)

_DIVISORS = (4, 1)
"""Sequences are the sequence length over each of these."""
_TIMEOUT_MINUTES = 10.0


def measured_exchanges(
    args: Namespace,
    ranks: int,
    *,
    exchange: ExchangeName,
    block_size: int,
    device: torch.device,
    thoroughness: Thoroughness,
    clock: Clock,
) -> tuple[ExchangeRow, ...]:
    """Time the exchange of a layer between 2, 4, ... ranks; collective over all of them.

    The world of these ranks, found as torchrun says, is started and ended here. A sequence is as
    slow as its slowest member. Attention itself is left out. ``args`` are cut down to one rank's
    share of heads; the rows are of both directions of every number of ranks and length.
    """
    rows = []
    with data_parallel_world(device):
        groups = make_sequence_groups(
            ranks & -ranks,
            exchange=exchange,
            ranks_per_node=RANKS_PER_NODE if device.type == "cpu" else torch.cuda.device_count(),
            timeout_minutes=_TIMEOUT_MINUTES,
        )
        config = transformer_config(args)
        for size, group in groups.by_size.items():
            lengths = {max(size * block_size, args.seq_length // divisor) for divisor in _DIVISORS}
            for tokens in sorted(lengths if size > 1 else ()):
                timed = _exchange(config, group, tokens, block_size, device)
                rows += _timed_rows(timed, group, config, tokens, thoroughness, clock)
    return tuple(rows)


def _exchange(
    config: Any, group: SequenceGroup, tokens: int, block_size: int, device: torch.device
) -> Timed:
    """Forward and backward of a sequence of one document, whose attention costs nothing."""
    assert group.exchange is not None, "a group of several members has an exchange"
    held = SequenceSlice.dealt((0, tokens), group, block_size=block_size, device=device)
    (key_dim, value_dim), groups = head_dims(config), config.num_query_groups
    q_THD, k_TGD, v_TGF = qkv = tuple(
        torch.ones(
            (held.local_layout.tokens, heads, head_dim),
            dtype=config.params_dtype,
            device=device,
            requires_grad=True,
        )
        for heads, head_dim in (
            (config.num_attention_heads, key_dim),
            (groups, key_dim),
            (groups, value_dim),
        )
    )
    selection = Selection(
        indices_QCK=held.own_block_N.int()[:, None, None].repeat(1, groups, 1),
        counts_QC=torch.ones((held.local_layout.blocks, groups), dtype=torch.int32, device=device),
        by_token=False,
        query_layout=held.local_layout,
        kv_layout=held.whole_layout,
        own_block_N=held.own_block_N,
    )
    kernel = ExchangingKernel(exchange=group.exchange, sequence=held, kernel=_NoAttention())

    def forward() -> Tensor:
        out_THF, _ = Attention.apply(q_THD, k_TGD, v_TGF, None, selection, 1.0, kernel, None)
        return out_THF

    gradient_THF = q_THD.new_ones(*q_THD.shape[:2], value_dim)
    return Timed(forward=forward, backward=backward_from(gradient_THF, inputs=qkv))


def _timed_rows(
    timed: Timed,
    group: SequenceGroup,
    config: Any,
    tokens: int,
    thoroughness: Thoroughness,
    clock: Clock,
) -> list[ExchangeRow]:
    # As often on all members: a clock would stop them at different repeats.
    repeats = thoroughness.most_repeats
    runs_ms = []
    for _ in range(thoroughness.warm_up + repeats):
        dist.barrier(group.process_group)
        runs_ms.append(time_once(timed, clock))
    of_members: list[Any] = [None] * group.members
    dist.all_gather_object(of_members, runs_ms[thoroughness.warm_up :], group.process_group)
    slowest_ms = np.array(of_members).max(axis=0)
    dtype = str(config.params_dtype).removeprefix("torch.")
    cost = Exchange.of(config.num_query_groups * sum(head_dims(config)), dtype)
    per_token = cost.bytes_per_token, cost.bytes_per_token + cost.gradient_bytes_per_token
    return [
        ExchangeRow(
            width=group.members,
            received_bytes=round(received_bytes(tokens, group.members, bytes_per_token)),
            **median_and_spread(times_ms),
        )
        for bytes_per_token, times_ms in zip(per_token, slowest_ms.T, strict=True)
    ]


class _NoAttention:
    """A kernel that reads nothing."""

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, *_: Any, **scale: Any
    ) -> tuple[Tensor, Tensor]:
        out_THF = q_THD[..., :1].expand(-1, -1, v_TGF.shape[2])
        return out_THF, q_THD.new_zeros(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype))

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        return dout_THF[..., :1].expand_as(saved.q_THD), saved.k_TGD, saved.v_TGF

    def obstacle(self, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
        return None
