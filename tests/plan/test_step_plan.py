# SPDX-License-Identifier: Apache-2.0
"""Every broken invariant of a plan is found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import cost_model, coverage_curves, job_shape, policy

from sparsebalance_megatron.cost.stage_calibration import StageScales
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_plan import PlanError

LENGTHS = [500, 700, 900, 1100]
JOB = job_shape(2, 2)
POLICY = policy(max_tokens_per_slot=1500)


@pytest.fixture
def plan():
    return plan_step(
        step=3,
        lengths_tokens=LENGTHS,
        job=JOB,
        policy=replace(POLICY, batching="arrival"),
        cost=cost_model(),
        scales=StageScales.ones(1),
        coverage=coverage_curves(JOB.layers),
    )


def with_first(plan, **changes):
    """The plan with the first micro-batch of rank 0 changed."""
    first, *others = plan.ranks[0].micro_batches
    rank = replace(plan.ranks[0], micro_batches=(replace(first, **changes), *others))
    return replace(plan, ranks=(rank, *plan.ranks[1:]))


def test_a_plan_is_valid(plan):
    plan.validate(LENGTHS, JOB, POLICY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": (), "lengths_tokens": ()}, "rank 0, micro-batch 0: empty"),
        ({"lengths_tokens": (1501,)}, "1501 tokens exceed the cap of 1500"),
        ({"samples": (4,)}, "outside the global batch"),
        ({"lengths_tokens": (501,)}, "lengths differ"),
        ({"budgets_LS": np.ones((3, 1), dtype=np.int32)}, r"shape \(3, 1\), expected \(2, 1\)"),
        ({"budgets_LS": np.zeros((2, 1), dtype=np.int32)}, "below 1 block"),
        ({"samples": (1,), "lengths_tokens": (700,)}, r"missing \[0\], repeated \[1\]"),
    ],
)
def test_broken_micro_batches(plan, changes, words):
    with pytest.raises(PlanError, match=words):
        with_first(plan, **changes).validate(LENGTHS, JOB, POLICY)


def test_broken_counts(plan):
    with pytest.raises(PlanError, match="1 ranks, job 2"):
        replace(plan, ranks=plan.ranks[:1]).validate(LENGTHS, JOB, POLICY)
    short = replace(plan.ranks[1], micro_batches=plan.ranks[1].micro_batches[:1])
    with pytest.raises(PlanError, match="rank 1: 1 micro-batches, job has 2"):
        replace(plan, ranks=(plan.ranks[0], short)).validate(LENGTHS, JOB, POLICY)


def test_digest_covers_placement_and_budgets(plan):
    budgets_LS = plan.ranks[0].micro_batches[0].budgets_LS.copy()
    budgets_LS[1, 0] += 1
    swapped = replace(plan, ranks=plan.ranks[::-1])
    variants = [plan, replace(plan, step=4), swapped, with_first(plan, budgets_LS=budgets_LS)]
    assert len({variant.digest() for variant in variants}) == len(variants)
    assert plan.digest() == replace(plan, batching="length").digest()
