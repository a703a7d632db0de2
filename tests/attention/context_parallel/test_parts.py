# SPDX-License-Identifier: Apache-2.0
"""Attention over members' rows one at a time, in one process, against attention over the row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from attention.cases import NAMES, SCALE, Case, assert_as_good_as_plain, make_case
from attention.context_parallel.rows import BLOCK, random_owners
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance_megatron.attention.api import kernel_named
from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners
from sparsebalance_megatron.attention.context_parallel.parts import attend, attend_backward
from sparsebalance_megatron.attention.context_parallel.shard import row_shard

CU_SEQLENS, BUDGETS, BLOCKS = [0, 1, 2, 30, 51, 111], [1, 3, 2, 3, 5], 17


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
) -> Sequence[Tensor]:
    """out, lse, dq, dk, dv put together from all members' calls; visits in random order."""
    kernel, generator = kernel_named(implementation), random.Random(seed)
    q, k, v, dout = (x.to(dtype) for x in (case.q_THD, case.k_TGD, case.v_TGD, case.dout_THD))
    wide = torch.promote_types(dtype, torch.float32)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide)
    dkv = torch.zeros(len(k), 2, *k.shape[1:], dtype=wide)
    for member in range(owners.members):
        shard = row_shard(owners, member, "cpu")
        others = [other for other in range(owners.members) if other != member]
        visitors = [member, *generator.sample(others, len(others))]
        tokens = [torch.from_numpy(owners.tokens_of(visitor)) for visitor in visitors]
        visits = [
            (visitor, torch.stack((k[rows], v[rows]), 1))
            for visitor, rows in zip(visitors, tokens, strict=True)
        ]
        selection = shard.local_selection(case.selection)
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
    return out, lse, dq, *dkv.to(dtype).unbind(1)


def _owners(members: int, seed: int) -> BlockOwners:
    return BlockOwners(
        cu_seqlens=tuple(CU_SEQLENS),
        block_size=BLOCK,
        owner_N=random_owners(BLOCKS, members, seed),
        members=members,
    )


@pytest.mark.parametrize(
    ("implementation", "granularity"),
    [
        ("blocks", "previous-block"),
        ("tokens", "token-kv-head"),
        ("tokens", "token-query-head"),
        ("reference", "first-query"),
    ],
)
@settings(max_examples=6)
@given(members=st.integers(2, 5), seed=st.integers(0, 99))
def test_parts_are_the_whole(
    implementation: str, granularity: str, members: int, seed: int
) -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity=granularity)
    ours = in_parts(case, implementation, torch.float64, _owners(members, seed), seed)
    exact = case.ours("reference", torch.float64)
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_lose_no_precision(dtype: torch.dtype) -> None:
    """Sums over parts are made in float32: the error is that of the inputs' dtype."""
    case = make_case(
        CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, granularity="token-kv-head", dtype=dtype
    )
    ours = in_parts(case, "tokens", dtype, _owners(5, 1), 1)
    assert_as_good_as_plain(case, ours, dtype, case.plain(torch.float64))
