# SPDX-License-Identifier: Apache-2.0
"""Every broken invariant of a plan is found and named."""

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import changed_settings, job_shape, plan_settings, planned, step_inputs

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule

LENGTHS = [500, 700, 900, 1100]
JOB = job_shape(2, 2)
POLICY = plan_settings(max_tokens_per_micro_batch=1500)


@pytest.fixture
def plan():
    return planned(3, **step_inputs(JOB, LENGTHS, batching="arrival"))


def with_first(plan, **changes):
    """The plan with the first micro-batch of rank 0 changed."""
    first, *others = plan.micro_batches
    return replace(plan, micro_batches=(replace(first, **changes), *others))


@pytest.fixture
def shared(plan):
    """The first micro-batch of rank 0 spans both ranks and holds what rank 1 had."""
    first, second, third, fourth = plan.micro_batches
    joined = replace(
        first,
        samples=(*first.samples, *third.samples),
        lengths_tokens=(*first.lengths_tokens, *third.lengths_tokens),
        budgets_LS=np.concatenate([first.budgets_LS, third.budgets_LS], axis=1),
        cp_size=2,
    )
    return replace(plan, micro_batches=(joined, second, fourth))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": (), "lengths_tokens": ()}, "rank 0, micro-batch 0: empty"),
        ({"lengths_tokens": (1501,)}, "1501 tokens exceed the cap of 1500"),
        ({"samples": (4,)}, "outside the global batch"),
        ({"lengths_tokens": (501,)}, "lengths differ"),
        ({"budgets_LS": np.ones((3, 1), dtype=np.int32)}, r"shape \(3, 1\), expected \(2, 1\)"),
        ({"budgets_LS": np.zeros((2, 1), dtype=np.int32)}, "below 1 block"),
        (
            {"dense_documents_L": np.array([1])},
            r"dense documents \[1\]: expected 2",
        ),
        ({"dense_documents_L": np.array([0, 2])}, r"dense documents \[0, 2\]"),
        ({"samples": (1,), "lengths_tokens": (700,)}, r"missing \[0\], repeated \[1\]"),
    ],
)
def test_broken_micro_batches(plan, changes, words):
    with pytest.raises(PlanError, match=words):
        with_first(plan, **changes).validate(LENGTHS, JOB, POLICY)


def test_broken_places(plan):
    with pytest.raises(PlanError, match="1 ranks, job 2"):
        replace(plan, data_parallel_size=1).validate(LENGTHS, JOB, POLICY)
    with pytest.raises(
        PlanError, match="rank 1, micro-batch 1: in 0 micro-batches, must be in exactly 1"
    ):
        replace(plan, micro_batches=plan.micro_batches[:-1]).validate(LENGTHS, JOB, POLICY)
    with pytest.raises(PlanError, match="micro-batch 2: job has 2"):
        with_first(plan, position=2).validate(LENGTHS, JOB, POLICY)


def test_a_rank_reads_its_micro_batches_position_by_position(plan):
    shuffled = replace(plan, micro_batches=plan.micro_batches[::-1])
    for rank in (0, 1):
        micro_batches = shuffled.for_rank(rank).micro_batches
        assert [(micro_batch.rank, micro_batch.position) for micro_batch in micro_batches] == [
            (rank, 0),
            (rank, 1),
        ]
    assert shuffled.digest() == plan.digest()


def test_a_shared_micro_batch_belongs_to_all_its_ranks(shared):
    shared.validate(LENGTHS, JOB, POLICY)
    of_ranks = [shared.for_rank(rank).micro_batches for rank in (0, 1)]
    assert of_ranks[0][0] is of_ranks[1][0] is shared.micro_batches[0]
    assert [micro_batches[1].rank for micro_batches in of_ranks] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_size": 1}, "rank 1, micro-batch 0: in 0 micro-batches"),
        ({"cp_size": 0}, "0 is no power of two"),
        ({"cp_size": 3}, "3 is no power of two"),
        ({"rank": 1}, "rank 1 no multiple of it"),
        ({"rank": 2}, "2 ranks from there are not all among the job's 2"),
        ({"position": 1}, "rank 0, micro-batch 0: in 0 micro-batches"),
    ],
)
def test_broken_shared_micro_batches(shared, changes, words):
    policy_ = replace(POLICY, max_tokens_per_micro_batch=3000)
    with pytest.raises(PlanError, match=words):
        with_first(shared, **changes).validate(LENGTHS, JOB, policy_)


def test_ranks_that_share_leave_time_for_one_another_s_segments(shared):
    """Both run a shared micro-batch, then rank 0 one of three segments and rank 1 one of one."""
    joined, cut, whole = shared.micro_batches
    found = replace(
        shared, micro_batches=(joined, replace(cut, segment_starts_blocks=(0, 2, 3)), whole)
    )
    policy = changed_settings(POLICY, max_segments=3)
    found.validate(LENGTHS, JOB, policy)
    assert found.schedule_of(0) == SegmentedSchedule((1, 3), (1, 3))
    assert found.schedule_of(1) == SegmentedSchedule((1, 1), (1, 3))
    with pytest.raises(PlanError, match="lockstep group"):
        found.validate(LENGTHS, replace(JOB, lockstep_ranks=2), policy)


def test_every_segment_has_a_block_for_each_of_its_ranks(shared):
    policy = changed_settings(POLICY, max_segments=3)
    blocks = sum(
        -(-tokens // POLICY.config.block_size) for tokens in shared.micro_batches[0].lengths_tokens
    )
    with_first(shared, segment_starts_blocks=(0, 2, blocks - 2)).validate(LENGTHS, JOB, policy)
    for segment_starts_blocks in ((0, 1), (0, 2, 3), (0, blocks - 1)):
        with pytest.raises(PlanError, match=f"segments begin at .* of {blocks} on 2 ranks"):
            with_first(shared, segment_starts_blocks=segment_starts_blocks).validate(
                LENGTHS, JOB, policy
            )


def test_the_cap_is_that_of_a_rank(shared):
    tight = replace(POLICY, max_tokens_per_micro_batch=shared.micro_batches[0].tokens // 2 - 1)
    with pytest.raises(PlanError, match=f"cap of {2 * tight.max_tokens_per_micro_batch}"):
        shared.validate(LENGTHS, JOB, tight)


def test_digest_covers_placement_and_budgets(plan):
    budgets_LS = plan.micro_batches[0].budgets_LS.copy()
    budgets_LS[1, 0] += 1
    swapped = replace(
        plan,
        micro_batches=tuple(replace(each, rank=1 - each.rank) for each in plan.micro_batches),
    )
    variants = [
        plan,
        swapped,
        replace(plan, step=4),
        with_first(plan, budgets_LS=budgets_LS),
        with_first(plan, lengths_tokens=(501,)),
        with_first(plan, cp_size=2),
    ]
    assert len({variant.digest() for variant in variants}) == len(variants)
    assert plan.digest() == replace(plan, batching="length").digest()
