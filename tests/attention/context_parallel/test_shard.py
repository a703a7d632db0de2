# SPDX-License-Identifier: Apache-2.0
"""A member's share of a row, and the part of its lists that another member holds."""

from __future__ import annotations

import pytest
import torch
from attention.cases import make_case
from attention.context_parallel.rows import BLOCK, owned_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.context_parallel import tokens_of_members

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners, dealt_row
from sparsebalance_megatron.attention.context_parallel.exchange import exchanged_attention
from sparsebalance_megatron.attention.context_parallel.parts import part_of
from sparsebalance_megatron.attention.context_parallel.shard import row_shard
from sparsebalance_megatron.attention.selection import Selection


def _lists(selection: Selection) -> list[list[list[int]]]:
    return [
        [
            selection.indices_QCK[row, head, : int(selection.counts_QC[row, head])].tolist()
            for head in range(selection.counts_QC.shape[1])
        ]
        for row in range(selection.selecting_rows)
    ]


@given(owned_rows())
def test_a_shard_is_the_members_tokens_and_blocks(owners: BlockOwners) -> None:
    whole = tokens_of_members(
        list(owners.cu_seqlens), BLOCK, owners.owner_N.tolist(), owners.members
    )
    longest, most = max(owners.tokens_per_member), max(owners.blocks_per_member)
    for member, held in enumerate(whole):
        shard = row_shard(owners, member, "cpu")
        tokens = [token for token, _, _ in held]
        blocks = sorted({block for _, _, block in held})
        assert shard.token_T.tolist() == tokens
        assert shard.local(torch.arange(owners.cu_seqlens[-1]) * 3).tolist() == [
            3 * token for token in tokens
        ]
        assert shard.own_block_N.tolist() == blocks
        assert shard.row_layout.block_T[shard.token_T].tolist() == [block for _, _, block in held]
        assert shard.own_block_N[shard.local_layout.block_T].tolist() == [
            block for _, _, block in held
        ]
        assert shard.member_layouts[member] is shard.local_layout
        assert [layout.tokens for layout in shard.member_layouts] == [len(x) for x in whole]
        assert shard.slot_T[tokens].tolist() == [member * longest + i for i in range(len(tokens))]
        assert shard.slot_N[blocks].tolist() == [member * most + i for i in range(len(blocks))]


@settings(max_examples=25)
@given(owned_rows(), st.sampled_from(["previous-block", "token-kv-head", "token-query-head"]))
def test_parts_of_lists_hold_what_members_hold(owners: BlockOwners, granularity: str) -> None:
    """In order, nothing lost, nothing twice, the own block known where it is."""
    documents = len(owners.cu_seqlens) - 1
    case = make_case(
        list(owners.cu_seqlens),
        [1 + s % 4 for s in range(documents)],
        block=BLOCK,
        head_dim=4,
        granularity=granularity,
    )
    # Past a list's end anything may lie.
    past = torch.arange(case.selection.indices_QCK.shape[2]) >= case.selection.counts_QC[..., None]
    case.selection.indices_QCK[past] = torch.iinfo(torch.int32).min
    for member in range(owners.members):
        shard = row_shard(owners, member, "cpu")
        local = shard.local_selection(case.selection)
        rows = shard.token_T if local.by_token else shard.own_block_N
        whole = [_lists(case.selection)[row] for row in rows.tolist()]
        assert _lists(local) == whole
        for holder in range(owners.members):
            blocks = owners.blocks_of(holder).tolist()
            part = part_of(local, shard, holder)
            expected = [
                [[blocks.index(n) for n in one if n in blocks] for one in row] for row in whole
            ]
            assert _lists(part) == expected
            assert part.kv_layout is shard.member_layouts[holder]
            assert part.own_block_N.tolist() == (
                list(range(len(blocks))) if holder == member else [-1] * len(shard.own_block_N)
            )


def test_parts_are_cut_without_reading_the_device() -> None:
    """Tensors of the meta device have no values that the host could read."""
    owners = dealt_row([0, 3, 40], BLOCK, members=2)
    shard = row_shard(owners, 0, "meta")
    lists = torch.empty(len(shard.own_block_N), 2, 5, dtype=torch.int32, device="meta")
    selection = shard.selection(indices_QCK=lists, counts_QC=lists[:, :, 0], by_token=False)
    # The second document has 5 blocks, of which the members hold 2 and 3.
    widths = [part_of(selection, shard, member).indices_QCK.shape[2] for member in range(2)]
    assert widths == [2, 3]


@pytest.mark.parametrize("member", [-1, 2])
def test_a_member_outside_the_group_is_refused(member: int) -> None:
    with pytest.raises(ValueError, match=f"member {member}: the context group has 0 to 1"):
        row_shard(dealt_row([0, 20], BLOCK, members=2), member, "cpu")


@pytest.mark.parametrize(
    ("implementation", "granularity"),
    [("blocks", "previous-block"), ("tokens", "token-kv-head"), ("reference", "token-query-head")],
)
def test_a_group_of_one_member_is_the_plain_path(implementation: str, granularity: str) -> None:
    case = make_case([0, 3, 40], [2, 3], block=BLOCK, head_dim=4, granularity=granularity)
    shard = row_shard(dealt_row([0, 3, 40], BLOCK, members=1), 0, "cpu")
    selection = shard.local_selection(case.selection)
    plain = case.run(
        lambda q, k, v: block_sparse_attention(
            q, k, v, case.selection, softmax_scale=0.4, implementation=implementation
        ),
        torch.float32,
    )
    ours = case.run(
        lambda q, k, v: exchanged_attention(
            q,
            k,
            v,
            selection,
            shard=shard,
            exchange=None,
            softmax_scale=0.4,
            implementation=implementation,
        ),
        torch.float32,
    )
    for a, b in zip(ours, plain, strict=True):
        assert a.equal(b)


def test_what_does_not_belong_together_is_refused() -> None:
    case = make_case([0, 3, 40], [2, 3], block=BLOCK, head_dim=4)
    owners = dealt_row([0, 3, 40], BLOCK, members=2)
    first, second = (row_shard(owners, member, "cpu") for member in range(2))
    inputs = [first.local(x) for x in (case.q_THD, case.k_TGD, case.v_TGD)]
    with pytest.raises(ValueError, match="the selection was not made for this shard"):
        exchanged_attention(
            *inputs,
            second.local_selection(case.selection),
            shard=first,
            exchange=None,
            softmax_scale=0.4,
        )
    with pytest.raises(ValueError, match="member 0 of 2, the exchange is none"):
        exchanged_attention(
            *inputs,
            first.local_selection(case.selection),
            shard=first,
            exchange=None,
            softmax_scale=0.4,
        )
