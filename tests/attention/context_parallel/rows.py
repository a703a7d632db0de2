# SPDX-License-Identifier: Apache-2.0
"""Packed rows with an owner for every block, and attention of all members in one process."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from attention.cases import SCALE, Case, on_device
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance_megatron.attention.api import kernel_named
from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners
from sparsebalance_megatron.attention.context_parallel.parts import attend, attend_backward
from sparsebalance_megatron.attention.context_parallel.shard import row_shard

BLOCK = 8


def random_owners(blocks: int, members: int, seed: int) -> np.ndarray:
    """Every member holds a block; shares are uneven."""
    generator = random.Random(seed)
    weights = [1 + 2 * member for member in range(members)]
    owners = [*range(members), *generator.choices(range(members), weights, k=blocks - members)]
    generator.shuffle(owners)
    return np.array(owners)


@st.composite
def owned_rows(draw: st.DrawFn, max_members: int = 5) -> BlockOwners:
    """Ragged documents, random owners."""
    lengths = draw(st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=5))
    blocks = sum(-(-length // BLOCK) for length in lengths)
    members = draw(st.integers(1, min(max_members, blocks)))
    return BlockOwners(
        cu_seqlens=(0, *itertools.accumulate(lengths)),
        block_size=BLOCK,
        owner_N=random_owners(blocks, members, draw(st.integers(0, 99))),
        members=members,
    )


class Kept:
    """What a member has for each visiting row, kept in the order of the visits."""

    def __init__(self) -> None:
        self.added: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        self.added.append(x)

    def result(self) -> Tensor:
        return self.added[0]


def in_parts(
    case: Case, implementation: str, dtype: torch.dtype, owners: BlockOwners, seed: int
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv put together from all members' calls; visits in random order."""
    kernel, generator = kernel_named(implementation), random.Random(seed)
    q, k, v, dout = (
        x.to(case.device, dtype) for x in (case.q_THD, case.k_TGD, case.v_TGD, case.dout_THD)
    )
    wide = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    dkv = torch.zeros(len(k), 2, *k.shape[1:], dtype=wide, device=q.device)
    for member in range(owners.members):
        shard = row_shard(owners, member, case.device)
        others = [other for other in range(owners.members) if other != member]
        visitors = [member, *generator.sample(others, len(others))]
        tokens = [torch.from_numpy(owners.tokens_of(visitor)).to(q.device) for visitor in visitors]
        visits = [
            (visitor, torch.stack((k[rows], v[rows]), 1))
            for visitor, rows in zip(visitors, tokens, strict=True)
        ]
        selection = shard.local_selection(on_device(case.selection, case.device))
        settings = {"shard": shard, "kernel": kernel, "softmax_scale": SCALE}
        rows = shard.token_T
        results = attend(q[rows], iter(visits), selection, **settings)
        sums = Kept()
        dq_local, *own = attend_backward(
            dout[rows], q[rows], iter(visits), *results, selection, sums, **settings
        )
        out[rows], lse[rows], dq[rows] = *results, dq_local
        for held, added in zip(tokens, sums.added, strict=True):
            assert added.dtype == wide
            dkv[held] += added
        for gradient, added in zip(own, sums.added[0].unbind(1), strict=True):
            assert gradient.equal(added.to(dtype))
    return tuple(x.cpu() for x in (out, lse, dq, *dkv.to(dtype).unbind(1)))
