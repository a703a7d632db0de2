# SPDX-License-Identifier: Apache-2.0
"""Plans whose numbers of positions are planned, for ranks that wait in every layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import DEFAULT_TUNING, planned
from plan.search.test_lockstep_order import arguments

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_plan import PlanError

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 3, 1, 1), (4, 4, 1, 1), (8, 2, 1, 1), (2, 5, 1, 1)])
"""Ranks, positions, stages and chunks."""


def positions_of(plan):
    return plan.expectation.times_2RPVM.shape[-1]


def both(shape, seed, lockstep_ranks, **changes):
    """Inputs and plans of planned and of fixed numbers of positions."""
    given_ = [
        arguments(shape, seed, lockstep_ranks, plans_positions=plans, **changes)
        for plans in (True, False)
    ]
    return given_, [planned(**each) for each in given_]


@given(SEEDS, SHAPES, st.sampled_from([2, 4]), st.sampled_from(["off", DEFAULT_TUNING]))
def test_every_sample_runs_once_in_no_more_positions_than_the_job_has(
    seed, shape, lockstep_ranks, tuning
):
    lockstep_ranks = min(lockstep_ranks, shape[0])
    (given_, _), (plan, fixed) = both(shape, seed, lockstep_ranks, tuning=tuning)
    positions, expected = positions_of(plan), plan.expectation
    assert positions <= shape[1] == positions_of(fixed)
    plan.validate(
        given_["lengths_tokens"],
        replace(given_["job"], micro_batches=positions),
        given_["plan_settings"],
    )
    assert {len(plan.for_rank(rank).micro_batches) for rank in range(shape[0])} == {positions}
    assert expected.lower_bound_ms <= expected.makespan_ms * (1 + 1e-9)
    assert expected.lower_bound_ms <= fixed.expectation.makespan_ms * (1 + 1e-9)
    if tuning == "off":
        assert expected.makespan_ms <= fixed.expectation.makespan_ms * (1 + 1e-8)


def test_fewer_positions_are_found_and_the_cap_limits_them():
    shape = (4, 8, 1, 1)
    _, (plan, fixed) = both(shape, 3, 4, tuning="off")
    assert positions_of(plan) < 8
    assert plan.expectation.makespan_ms < 0.9 * fixed.expectation.makespan_ms
    lengths = [500 + 13 * sample for sample in range(64)]
    cap_tokens = -(-sum(lengths) // (4 * 5))
    given_ = arguments(
        shape, 3, 4, tuning="off", plans_positions=True, max_tokens_per_micro_batch=cap_tokens
    )
    capped = planned(**given_ | {"lengths_tokens": lengths})
    assert 5 <= positions_of(capped) <= 8
    assert all(each.tokens <= cap_tokens for each in capped.micro_batches)


@pytest.mark.parametrize(
    ("shape", "lockstep_ranks", "batching"),
    [
        ((4, 4, 2, 1), 4, DEFAULT_TUNING),
        ((4, 4, 1, 1), 1, DEFAULT_TUNING),
        ((4, 4, 1, 1), 4, "latency"),
        ((4, 4, 1, 1), 4, "arrival"),
    ],
)
def test_the_number_is_the_jobs_where_it_cannot_be_planned(shape, lockstep_ranks, batching):
    _, (plan, fixed) = both(shape, 1, lockstep_ranks, batching=batching, tuning="off")
    assert positions_of(plan) == positions_of(fixed) == 4
    assert plan.digest() == fixed.digest()
    assert plan.expectation.lower_bound_ms == fixed.expectation.lower_bound_ms


def test_a_placement_that_is_given_keeps_its_positions():
    given_ = arguments((4, 6, 1, 1), 1, 4, size=1, plans_positions=True)
    placement = tuple(tuple((6 * rank + m,) for m in range(6)) for rank in range(4))
    assert positions_of(planned(**given_, placement=placement)) == 6


def test_too_few_tokens_per_micro_batch_are_an_error_all_the_same():
    given_ = arguments((4, 2, 1, 1), 1, 4, plans_positions=True, max_tokens_per_micro_batch=100)
    with pytest.raises(PlanError, match="tokens"):
        planned(**given_)


def test_context_parallel_groups_may_have_fewer_positions():
    given_ = arguments(
        (8, 4, 1, 1), 2, 8, tuning="off", plans_positions=True, max_context_parallel=2
    )
    given_["job"] = replace(given_["job"], context_parallel_size=2)
    plan = planned(**given_)
    positions = positions_of(plan)
    assert positions < 4
    assert all(each.cp_size == 2 for each in plan.micro_batches)
    held = np.zeros((8, positions), dtype=int)
    for each in plan.micro_batches:
        held[each.rank : each.rank + 2, each.position] += 1
    assert (held == 1).all()


@pytest.mark.parametrize("positions", ["planned", "fixed"])
def test_users_choose(positions):
    plan_settings = PlanSettings.from_config(SparseBalanceConfig(positions=positions), 1000)
    assert plan_settings.plans_positions == (positions == "planned")
