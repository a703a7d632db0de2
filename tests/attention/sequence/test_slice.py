# SPDX-License-Identifier: Apache-2.0
"""A member's slice of a packed sequence, and the part of its lists that another member holds."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from attention.cases import SCALE, make_case
from attention.sequence.slices import (
    BLOCK,
    InOneProcess,
    local_selection,
    sliced_sequences,
    slices_of,
)
from hypothesis import given
from hypothesis import strategies as st
from oracles.attention import tokens_of_members

from sparsebalance_megatron.attention.layout import block_grid
from sparsebalance_megatron.attention.sequence.exchange import sequence_attention
from sparsebalance_megatron.attention.sequence.slice import (
    SequenceGroup,
    SequenceSlice,
    dealt_owners,
)


def dealt(
    cu_seqlens: list[int], members: int, member: int = 0, block: int = BLOCK
) -> SequenceSlice:
    group = SequenceGroup(member=member, members=members)
    return SequenceSlice.dealt(cu_seqlens, group, block_size=block)


def test_blocks_are_dealt_on_over_documents() -> None:
    first, last = (dealt([0, 5, 30, 31], 3, member, block=10) for member in (0, 2))
    assert first.owner_N.tolist() == [0, 1, 2, 0, 1]
    assert first.tokens_per_member == (10, 11, 10)
    assert first.tokens_T.tolist() == [*range(5), *range(25, 30)]
    assert first.local_layout.cu_seqlens == (0, 5, 10)
    assert last.local_layout.cu_seqlens == (0, 10)


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([1, 16, 64]),
)
def test_halves_are_even(lengths: list[int], members: int, block: int) -> None:
    """Everyone has a block, and two runs of a document at most, or blocks in turn; tokens differ by
    what one document can."""
    grid = block_grid(np.cumsum([0, *lengths]), block)
    members = min(members, len(grid.start_N))
    owner_N = dealt_owners(grid, slice(None), members, in_halves=True)
    tokens_W = np.bincount(owner_N, grid.length_N, members)
    assert tokens_W.all()
    if (owner_N == np.arange(len(owner_N)) % members).all():
        return
    for first, blocks in zip(grid.first_block_S, grid.blocks_S, strict=True):
        runs = itertools.groupby(owner_N[first : first + blocks])
        assert max(Counter(member for member, _ in runs).values()) <= 2
    assert np.ptp(tokens_W) <= 2 * block + max(lengths) / members


@given(sliced_sequences(), st.integers(1, 4))
def test_members_hold_the_sequence_token_by_token(
    slices: list[SequenceSlice], multiple: int
) -> None:
    owner_N, cu_seqlens = slices[0].owner_N, list(slices[0].cu_seqlens)
    whole = tokens_of_members(cu_seqlens, BLOCK, owner_N.tolist(), len(slices))
    longest = max(map(len, whole))
    most = np.bincount(owner_N).max()
    for member, (held, tokens) in enumerate(zip(slices, whole, strict=True)):
        numbers = [token for token, _, _ in tokens]
        blocks = sorted({block for _, _, block in tokens})
        assert held.tokens_T.tolist() == held.tokens_W[member].tolist() == numbers
        assert held.blocks_W[member].tolist() == held.layouts.own_block_N.tolist() == blocks
        runs = [len(list(run)) for _, run in itertools.groupby(tokens, key=lambda x: x[1])]
        assert held.local_layout.cu_seqlens == (0, *itertools.accumulate(runs))
        in_whole = [block for _, _, block in tokens]
        assert held.whole_layout.block_T[held.tokens_T].tolist() == in_whole
        assert held.layouts.own_block_N[held.local_layout.block_T].tolist() == in_whole
        assert list(held.tokens_per_member) == [len(x) for x in whole]
        assert held.gathered_T[numbers].tolist() == [
            member * longest + i for i in range(len(numbers))
        ]
        assert held.gathered_N[blocks].tolist() == [member * most + i for i in range(len(blocks))]
        padded = replace(held, pad_to_multiple_of=multiple)
        places = [token - cu_seqlens[document] for token, document, _ in tokens]
        assert padded.positions_T.tolist() == places + [0] * (-len(places) % multiple)
        assert padded.padding_tokens == -len(places) % multiple


@pytest.mark.parametrize(
    ("owner_N", "members", "message"),
    [
        ([0, 0, 2], 3, "leaves none to member 1: share it among at most 3"),
        ([0, 1], 2, "for 2 blocks: must name one of 2 for each of the sequence's 3 blocks"),
        ([0, 1, 2], 2, "names members 0 to 2"),
        ([0, -1, 1], 2, "negative"),
    ],
)
def test_owners_that_do_not_fit_are_refused(owner_N: list[int], members: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slices_of((0, 5, 13), np.array(owner_N), members, block=5)


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="of 2 blocks on 3 members leaves none to member 2"):
        dealt([0, 5, 6], 3)


def test_what_does_not_belong_together_is_refused() -> None:
    case = make_case([0, 3, 40], [2, 3], block=BLOCK, head_dim=4)
    first, second = (dealt([0, 3, 40], 2, member) for member in range(2))
    inputs = [x[first.tokens_T] for x in (case.q_THD, case.k_TGD, case.v_TGF)]
    right = local_selection(case.selection, first)
    for lists, message in (
        (replace(right, query_layout=second.local_layout), "not made for this slice"),
        (replace(right, kv_layout=second.whole_layout), "not made for this slice"),
    ):
        with pytest.raises(ValueError, match=message):
            sequence_attention(
                *inputs, lists, first, exchange=InOneProcess(*inputs[1:]), softmax_scale=SCALE
            )
