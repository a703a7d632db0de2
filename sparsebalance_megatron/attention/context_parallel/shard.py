# SPDX-License-Identifier: Apache-2.0
"""Thin stand-in until the exchange branch stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout


def deal(blocks: int, members: int, first: int = 0) -> np.ndarray:
    return (first + np.arange(blocks)) % members


def block_of_tokens(cu_seqlens, block_size):
    lengths = np.diff(cu_seqlens)
    blocks = -(-lengths // block_size)
    first = np.cumsum(blocks) - blocks
    return np.concatenate(
        [f + np.arange(n) // block_size for f, n in zip(first, lengths, strict=True)]
    )


def owned_tokens(cu_seqlens, block_size, owner_N, member) -> np.ndarray:
    return np.flatnonzero(owner_N[block_of_tokens(cu_seqlens, block_size)] == member)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowShard:
    row_layout: PackedLayout
    member: int
    members: int
    tokens_by_member: tuple[Tensor, ...]


def row_shard(cu_seqlens, block_size, owner_N, member, members, device) -> RowShard:
    return RowShard(
        row_layout=packed_layout(cu_seqlens, block_size, device),
        member=member,
        members=members,
        tokens_by_member=tuple(
            torch.from_numpy(owned_tokens(cu_seqlens, block_size, owner_N, each))
            for each in range(members)
        ),
    )


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, group):
        ctx.shard, ctx.group = shard, group
        if shard.members == 1:
            return x.clone()
        sizes = [len(t) for t in shard.tokens_by_member]
        m = max(sizes)
        send = x.new_zeros(m, *x.shape[1:])
        send[: x.shape[0]] = x
        out = x.new_empty(len(sizes) * m, *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, send, group=group)
        whole = x.new_empty(sum(sizes), *x.shape[1:])
        for i, t in enumerate(shard.tokens_by_member):
            whole[t] = out[i * m : i * m + len(t)]
        return whole

    @staticmethod
    def backward(ctx, d):
        shard = ctx.shard
        if shard.members > 1:
            d = d.contiguous().clone()
            torch.distributed.all_reduce(d, group=ctx.group)
        return d[shard.tokens_by_member[shard.member]], None, None
