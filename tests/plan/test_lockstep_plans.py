# SPDX-License-Identifier: Apache-2.0
"""Ranks that begin every layer together: how long they take, and plans of their steps.

Plans may have fewer positions than the job.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches; a leading
2: forward and backward.
"""

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import (
    job_shape,
    planned,
    random_lengths,
    step_inputs,
)

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.errors import PlanError


def arguments(shape, seed, lockstep_ranks, size=2, **changes):
    job = replace(job_shape(*shape), lockstep_ranks=lockstep_ranks)
    lengths = random_lengths(job.places * size, seed, longest=2**15)
    return {"step": 3} | step_inputs(job, lengths, seed, **changes)


def test_an_order_that_was_asked_for_or_given_stays():
    for batching in ("arrival", "length", "latency"):
        plans = [
            planned(**arguments((4, 6, 1, 1), 1, ranks, batching=batching, tuning="off"))
            for ranks in (1, 4)
        ]
        assert plans[0].digest() == plans[1].digest()
        blind_ms, lockstep_ms = (plan.expectation.makespan_ms for plan in plans)
        assert lockstep_ms > blind_ms
    placement = tuple(tuple((6 * rank + m,) for m in range(6)) for rank in range(4))
    given_ = arguments((4, 6, 1, 1), 1, 4, size=1, positions="planned")
    plan = planned(**given_, placement=placement)
    assert (
        tuple(
            tuple(each.samples for each in plan.for_rank(rank).micro_batches) for rank in range(4)
        )
        == placement
    )


@pytest.mark.parametrize(
    ("lockstep_ranks", "cp_size", "groups"), [(1, 2, 1), (2, 2, 1), (8, 2, 4), (2, 4, 1), (6, 4, 3)]
)
def test_groups_of_context_parallel_ranks_wait_as_their_ranks_do(lockstep_ranks, cp_size, groups):
    job = replace(job_shape(24, 2), context_parallel_size=cp_size, lockstep_ranks=lockstep_ranks)
    assert job.groups.lockstep_ranks == groups


@pytest.mark.parametrize("lockstep_ranks", [0, 3, 8])
def test_groups_divide_the_ranks(lockstep_ranks):
    with pytest.raises(ConfigError, match=f"lockstep_ranks {lockstep_ranks}: must divide the 4"):
        replace(job_shape(4, 2), lockstep_ranks=lockstep_ranks)


def positions_of(plan):
    return plan.expectation.times_2RPVM.shape[-1]


def both(shape, seed, lockstep_ranks, **changes):
    """Inputs and plans of planned and of fixed numbers of positions."""
    given_ = [
        arguments(shape, seed, lockstep_ranks, positions=positions, **changes)
        for positions in ("planned", "fixed")
    ]
    return given_, [planned(**each) for each in given_]


def test_fewer_positions_are_found_and_the_cap_limits_them():
    shape = (4, 8, 1, 1)
    _, (plan, fixed) = both(shape, 3, 4, tuning="off")
    assert positions_of(plan) < 8
    assert plan.expectation.makespan_ms < 0.98 * fixed.expectation.makespan_ms
    lengths = [500 + 13 * sample for sample in range(64)]
    cap_tokens = -(-sum(lengths) // (4 * 5))
    given_ = arguments(
        shape, 3, 4, tuning="off", positions="planned", max_tokens_per_micro_batch=cap_tokens
    )
    capped = planned(**given_ | {"lengths_tokens": lengths})
    assert 5 <= positions_of(capped) <= 8
    assert all(each.tokens <= cap_tokens for each in capped.micro_batches)


def test_too_few_tokens_per_micro_batch_are_an_error_all_the_same():
    given_ = arguments((4, 2, 1, 1), 1, 4, positions="planned", max_tokens_per_micro_batch=100)
    with pytest.raises(PlanError, match="tokens"):
        planned(**given_)


def test_context_parallel_groups_may_have_fewer_positions():
    given_ = arguments((8, 4, 1, 1), 2, 8, tuning="off", positions="planned", max_cp_size=2)
    given_["job"] = replace(given_["job"], context_parallel_size=2)
    plan = planned(**given_)
    positions = positions_of(plan)
    assert positions < 4
    assert all(each.cp_size == 2 for each in plan.micro_batches)


def test_packed_rows_of_a_pipeline_fall_to_both_ends():
    """Low rows fill and empty it; the best of rows of equal height are 1.18 times the bound."""
    ratios = []
    for seed in range(6):
        given_ = arguments((8, 8, 4, 1), seed, 8, tuning="off", plan_ms=2.0)
        expected = planned(**given_).expectation
        ratios.append(expected.makespan_ms / expected.lower_bound_ms)
    assert np.mean(ratios) < 1.16
