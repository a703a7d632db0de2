# SPDX-License-Identifier: Apache-2.0
"""Who holds which block and which token."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from attention.context_parallel.rows import owned_rows
from hypothesis import given
from hypothesis import strategies as st
from oracles.context_parallel import tokens_of_members

from sparsebalance_megatron.attention.context_parallel.block_owners import (
    BlockOwners,
    deal,
    dealt_row,
)


def test_blocks_are_dealt_on_over_documents() -> None:
    owners = dealt_row([0, 5, 30, 31], 10, members=3, first=2)
    assert owners.owner_N.tolist() == [2, 0, 1, 2, 0]
    assert owners.tokens_per_member == (11, 10, 10)
    assert owners.blocks_per_member == (2, 1, 2)
    assert owners.tokens_of(0).tolist() == [*range(5, 15), 30]
    assert owners.cu_seqlens_of(0) == (0, 10, 11)
    assert owners.cu_seqlens_of(2) == (0, 5, 10)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 20))
def test_no_member_gets_more_than_one_block_more(blocks: int, members: int, first: int) -> None:
    owner_N = deal(blocks, members, first)
    counts = np.bincount(owner_N, minlength=members)
    assert counts.max() - counts.min() <= 1
    assert owner_N[0] == first % members


@given(owned_rows())
def test_members_hold_the_row_token_by_token(owners: BlockOwners) -> None:
    expected = tokens_of_members(
        list(owners.cu_seqlens), owners.block_size, owners.owner_N.tolist(), owners.members
    )
    for member, held in enumerate(expected):
        assert owners.tokens_of(member).tolist() == [token for token, _, _ in held]
        assert owners.blocks_of(member).tolist() == sorted({block for _, _, block in held})
        assert owners.tokens_per_member[member] == len(held)
        runs = [len(list(run)) for _, run in itertools.groupby(held, key=lambda x: x[1])]
        assert owners.cu_seqlens_of(member) == (0, *itertools.accumulate(runs))


@pytest.mark.parametrize(
    ("owner_N", "members", "message"),
    [
        (np.array([0, 0, 2]), 3, "leaves none to member 1: give the row at most 3 members"),
        (np.array([0, 1]), 2, "one member for each of the row's 3 blocks"),
        (np.array([0.0, 1.0, 0.0]), 2, "must be int64"),
        (np.array([0, 1, 2]), 2, "names members 0 to 2: the context group has members 0 to 1"),
        (np.array([0, -1, 1]), 2, "names members -1 to 1"),
        (np.array([0, 0, 0]), 0, "must have at least 1"),
    ],
)
def test_owners_that_do_not_fit_are_refused(
    owner_N: np.ndarray, members: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockOwners(cu_seqlens=(0, 5, 13), block_size=5, owner_N=owner_N, members=members)


def test_a_row_with_fewer_blocks_than_members_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 blocks on 3 members leaves none to member 2"):
        dealt_row([0, 5, 6], 8, members=3)


def test_the_module_loads_no_torch() -> None:
    program = (
        "import sys, sparsebalance_megatron.attention.context_parallel.block_owners; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
