# SPDX-License-Identifier: Apache-2.0
"""Packed rows with an owner for every block."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import strategies as st

from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners

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
