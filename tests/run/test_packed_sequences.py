# SPDX-License-Identifier: Apache-2.0
"""What the ranks that share a row compute of it, together: the row, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.attention.sequence.slice import SequenceGroup
from sparsebalance_megatron.data.packing import PackedSequence, Sample
from sparsebalance_megatron.megatron.sequence_groups import SequenceGroups
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, PlanError
from sparsebalance_megatron.run.micro_batches import SequencePacking

BLOCK_TOKENS = 4
NO_GROUP: Any = None


def groups(rank: int, widest: int) -> SequenceGroups:
    """Those of one rank, without processes."""
    cp_sizes = [1 << power for power in range(widest.bit_length())]
    return SequenceGroups(
        rank=rank,
        by_size={
            cp_size: SequenceGroup(member=rank % cp_size, members=cp_size) for cp_size in cp_sizes
        },
        agreement=NO_GROUP,
    )


def micro_batch(
    lengths: list[int],
    rank: int = 0,
    cp_size: int = 1,
    segment_starts_blocks: tuple[int, ...] = (0,),
) -> MicroBatchPlan:
    return MicroBatchPlan(
        samples=tuple(range(len(lengths))),
        lengths_tokens=tuple(lengths),
        budgets_LS=np.ones((1, len(lengths)), dtype=np.int32),
        rank=rank,
        position=3,
        cp_size=cp_size,
        segment_starts_blocks=segment_starts_blocks,
    )


def samples(lengths: list[int]) -> list[Sample]:
    """Tokens that say where they are from; every third label is masked."""
    return [
        Sample(
            tokens=1000 * (number + 1) + np.arange(length + 1),
            loss_mask=(np.arange(length) % 3 > 0).astype(np.float32),
        )
        for number, length in enumerate(lengths)
    ]


def slices(
    lengths: list[int], cp_size: int, multiple: int, segment_starts_blocks: tuple[int, ...] = (0,)
) -> list[tuple[Any, PackedSequence]]:
    """Every member's slices and rows, on ranks that begin at twice the cp_size."""
    found = []
    for rank in range(2 * cp_size, 3 * cp_size):
        packing = SequencePacking(
            block_size=BLOCK_TOKENS, pad_to_multiple_of=multiple, groups=groups(rank, 8)
        )
        plan = micro_batch(lengths, 2 * cp_size, cp_size, segment_starts_blocks)
        rows = packing.packed(plan, samples(lengths))
        assert packing.computed_tokens(plan) == [len(row.tokens) for row in rows]
        found += zip(packing.slices(plan), rows, strict=True)
    return found


@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    cp_size=st.sampled_from([1, 2, 4, 8]),
    multiple=st.sampled_from([1, 2, 4]),
    further=st.lists(st.integers(0, 2), max_size=3),
)
def test_members_compute_the_row_once_and_padding_that_counts(
    lengths: list[int], cp_size: int, multiple: int, further: list[int]
) -> None:
    """Also in segments, of as many blocks as there are members and some more."""
    blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    firsts = np.cumsum([0, *(cp_size + more for more in further)])
    segment_starts_blocks = tuple(firsts[firsts + cp_size <= max(blocks, cp_size)].tolist())
    expected = {
        (1000 * (number + 1) + at, 1000 * (number + 1) + at + 1, at, float(at % 3 > 0))
        for number, length in enumerate(lengths)
        for at in range(length)
    }
    found, padded = [], 0
    for held, row in slices(lengths, cp_size, multiple, segment_starts_blocks):
        assert len(row.tokens) % multiple == 0
        assert len(row.tokens) == len(held.tokens_T) + held.padding_tokens > 0
        assert row.position_ids.tolist() == held.positions_T.tolist()
        columns = (row.tokens, row.labels, row.position_ids, row.loss_mask)
        rows = [entry for entry in zip(*(x.tolist() for x in columns), strict=True)]
        real = [entry for entry in rows if entry[0]]
        padded += len(rows) - len(real)
        assert all(entry == (0, 0, 0, 0.0) for entry in rows if not entry[0])
        found += real
    assert len(found) == len(expected)
    assert set(found) == expected
    packing = SequencePacking(
        block_size=BLOCK_TOKENS, pad_to_multiple_of=multiple, groups=groups(0, 8)
    )
    plan = micro_batch(lengths, cp_size=cp_size, segment_starts_blocks=segment_starts_blocks)
    assert packing.padded_tokens(plan) == padded


def test_a_row_with_too_few_blocks_gets_documents_of_one_token() -> None:
    packing = SequencePacking(block_size=BLOCK_TOKENS, groups=groups(2, 4))
    plan = micro_batch([5], cp_size=4)
    assert packing.cu_seqlens(plan) == (0, 5, 6, 7)
    assert packing.padded_tokens(plan) == 2
    assert [len(row.tokens) for _, row in slices([5], 4, 1)] == [4, 1, 1, 1]


def test_rows_of_a_run_that_shares_none_are_padded_as_a_whole() -> None:
    packing = SequencePacking(block_size=BLOCK_TOKENS, pad_to_multiple_of=4)
    plan = micro_batch([5, 2])
    assert packing.slices(plan) == [None]
    assert packing.cu_seqlens(plan) == (0, 5, 7, 8)
    (row,) = packing.packed(plan, samples([5, 2]))
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]


@pytest.mark.parametrize(("rank", "cp_size"), [(0, 8), (1, 2)])
def test_a_micro_batch_of_ranks_without_a_group_is_refused(rank: int, cp_size: int) -> None:
    packing = SequencePacking(block_size=BLOCK_TOKENS, groups=groups(1, 4))
    with pytest.raises(PlanError, match=f"ranks {rank} to {rank + cp_size - 1}: groups of 1, 2"):
        packing.slices(micro_batch([40], rank=rank, cp_size=cp_size))
