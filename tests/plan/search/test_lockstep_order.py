# SPDX-License-Identifier: Apache-2.0
"""Ranks that begin every layer together: how long they take, and the order that makes it less.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches; a leading
2: forward and backward.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import (
    cost_model,
    coverage_curves,
    flat,
    job_shape,
    placed,
    plan_settings,
    planned,
    random_cp_sizes,
    random_lengths,
    shared_times,
)

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.lockstep_order import falling_order_RM, in_lockstep_order
from sparsebalance_megatron.plan.step_costs import step_costs

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 3, 1, 1), (4, 4, 2, 1), (8, 4, 2, 2), (2, 5, 4, 1), (4, 1, 1, 1)])
"""Ranks, positions, stages and chunks."""


def lockstep_makespans_ms(times, lockstep_ranks):
    return makespans_ms(replace(times, lockstep_ranks=lockstep_ranks))


def group_times(times_2RPVM, ranks):
    """What groups of so many ranks take per operation, one row a group."""
    shape = times_2RPVM.shape
    grouped = times_2RPVM.reshape(2, shape[1] // ranks, ranks, *shape[2:])
    return grouped.max(axis=2)


def arguments(shape, seed, lockstep_ranks, size=2, **changes):
    job = replace(job_shape(*shape), lockstep_ranks=lockstep_ranks)
    return {
        "step": 3,
        "lengths_tokens": random_lengths(job.places * size, seed, longest=2**15),
        "job": job,
        "plan_settings": plan_settings(**changes),
        "cost": cost_model(),
        "scales": StageScales.ones(job.pipeline_stages, job.virtual_stages),
        "coverage": coverage_curves(job.layers, seed=seed),
    }


@given(SHAPES, SEEDS, st.sampled_from([1, 2, 4]))
def test_a_group_is_one_pipeline_whose_operations_take_the_largest_times(shape, seed, ranks):
    positions = shape[1]
    ranks = min(ranks, shape[0])
    times_2RPVM = shared_times(shape, np.ones((shape[0], positions), dtype=int), seed)
    expected_G = makespans_ms(flat(group_times(times_2RPVM, ranks)))
    found_R = lockstep_makespans_ms(flat(times_2RPVM), ranks)
    assert found_R.tolist() == pytest.approx(np.repeat(expected_G, ranks).tolist(), rel=1e-12)


@pytest.mark.parametrize("ranks", [3, 6])
def test_groups_need_not_be_powers_of_two(ranks):
    times_2RPVM = shared_times((6, 4, 2, 1), np.ones((6, 4), dtype=int), 5)
    expected_G = makespans_ms(flat(group_times(times_2RPVM, ranks)))
    found_R = lockstep_makespans_ms(flat(times_2RPVM), ranks)
    assert found_R.tolist() == pytest.approx(np.repeat(expected_G, ranks).tolist(), rel=1e-12)


@given(SEEDS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_without_a_pipeline_ranks_that_are_connected_begin_together(seed, ranks, widest):
    """Ranks of a lockstep group, and those of the micro-batches that they share; by hand."""
    positions = 4
    cp_sizes_RM = random_cp_sizes(8, positions, widest, seed)
    times_2RPVM = shared_times((8, positions, 1, 1), cp_sizes_RM, seed)
    free_R = np.zeros(8)
    # Each position's backward follows its forward.
    for position, direction in product(range(positions), (0, 1)):
        taken_R = times_2RPVM[direction, :, 0, 0, position]
        own_R = np.repeat(taken_R.reshape(-1, ranks).max(axis=1), ranks)
        begin_R = np.empty(8)
        for rank in range(8):
            together = max(ranks, cp_sizes_RM[rank, position])
            first = rank - rank % together
            begin_R[rank] = free_R[first : first + together].max()
        free_R = begin_R + own_R
    found_R = lockstep_makespans_ms(flat(times_2RPVM, cp_sizes_RM=cp_sizes_RM), ranks)
    assert found_R.tolist() == pytest.approx(free_R.tolist(), rel=1e-12)


@given(SEEDS, st.sampled_from([1, 2, 4]), st.integers(1, 7))
def test_falling_order_keeps_shared_micro_batches_together(seed, widest, positions):
    cp_sizes_RM = random_cp_sizes(8, positions, widest, seed)
    ms_RM = shared_times((8, positions, 1, 1), cp_sizes_RM, seed)[0, :, 0, 0]
    order_RM = falling_order_RM(ms_RM, cp_sizes_RM)
    assert (np.sort(order_RM, axis=1) == np.arange(positions)).all()
    ordered_RM = np.take_along_axis(cp_sizes_RM, order_RM, axis=1)
    for rank, position in np.ndindex(order_RM.shape):
        first = rank - rank % ordered_RM[rank, position]
        assert order_RM[first, position] == order_RM[rank, position]
    if cp_sizes_RM.max() == 1:
        assert (np.diff(np.take_along_axis(ms_RM, order_RM, axis=1)) <= 0).all()


@given(SEEDS, st.sampled_from([1, 2]))
def test_no_order_is_shorter_without_a_pipeline(seed, widest):
    """Against all orders of two ranks that keep shared micro-batches together."""
    positions = 4
    cp_sizes_RM = random_cp_sizes(2, positions, widest, seed)
    ms_RM = shared_times((2, positions, 1, 1), cp_sizes_RM, seed)[0, :, 0, 0]

    def taken_ms(order_RM):
        return np.take_along_axis(ms_RM, order_RM, axis=1).max(axis=0).sum()

    allowed = []
    for orders in product(permutations(range(positions)), repeat=2):
        order_RM = np.array(orders)
        shared_RM = np.take_along_axis(cp_sizes_RM, order_RM, axis=1) == 2
        if (order_RM[0] == order_RM[1])[shared_RM.any(axis=0)].all():
            allowed.append(taken_ms(order_RM))
    assert taken_ms(falling_order_RM(ms_RM, cp_sizes_RM)) == pytest.approx(min(allowed), rel=1e-12)


@given(SHAPES, SEEDS, st.sampled_from([2, 4]), st.sampled_from([1, 2]))
def test_the_order_is_never_longer_in_lockstep(shape, seed, lockstep_ranks, widest):
    job = replace(job_shape(*shape), lockstep_ranks=min(lockstep_ranks, shape[0]))
    cp_sizes_RM = random_cp_sizes(*shape[:2], widest, seed)
    first_J = np.arange(job.places).reshape(cp_sizes_RM.shape)[
        np.arange(shape[0])[:, None] % cp_sizes_RM == 0
    ]
    generator = np.random.default_rng(seed)
    micro_batch_of_S = np.r_[first_J, generator.choice(first_J, 5)]
    lengths = generator.integers(1, 2**15, len(micro_batch_of_S))
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_2SC = costs.sample_ms(np.full((job.layers, len(lengths)), 9))
    before = placed(micro_batch_of_S, job, cp_sizes_RM)
    after = in_lockstep_order(before, costs, sample_2SC)
    before_ms, after_ms = (
        lockstep_makespans_ms(costs.micro_batch_ms(sample_2SC, where), job.lockstep_ranks).max()
        for where in (before, after)
    )
    assert after_ms <= before_ms * (1 + 1e-8)
    for old, new, old_M, new_M in zip(
        before.samples, after.samples, before.cp_sizes_RM, after.cp_sizes_RM, strict=True
    ):
        assert sorted(zip(old, old_M, strict=True)) == sorted(zip(new, new_M, strict=True))
    again = in_lockstep_order(after, costs, sample_2SC)
    assert again.samples == after.samples


@given(SHAPES, SEEDS, st.sampled_from([1, 2, 4]))
def test_plans_of_groups_are_no_longer_than_the_order_of_arrival(shape, seed, lockstep_ranks):
    lockstep_ranks = min(lockstep_ranks, shape[0])
    given_ = arguments(shape, seed, lockstep_ranks)
    plan = planned(**given_)
    plan.validate(given_["lengths_tokens"], given_["job"], given_["plan_settings"])
    expected = plan.expectation
    assert expected.makespan_ms == max(expected.rank_makespan_ms)
    assert expected.lower_bound_ms <= expected.makespan_ms * (1 + 1e-12)
    arrival = planned(**arguments(shape, seed, lockstep_ranks, batching="arrival", tuning="off"))
    assert expected.makespan_ms <= arrival.expectation.makespan_ms * (1 + 1e-8)
    for ranks in np.split(np.array(expected.rank_makespan_ms), shape[0] // lockstep_ranks):
        assert len(set(ranks)) == 1


def test_without_a_pipeline_every_rank_runs_its_longest_micro_batch_first():
    for seed in range(5):
        plan = planned(**arguments((4, 6, 1, 1), seed, 4))
        ms_RM = plan.expectation.times_2RPVM.sum(axis=(0, 2, 3))
        assert (np.diff(ms_RM) <= 0).all()


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
    plan = planned(**arguments((4, 6, 1, 1), 1, 4, size=1), placement=placement)
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


@pytest.mark.parametrize("context_parallel", ["static", "dynamic"])
def test_shared_micro_batches_are_ordered_with_their_ranks(context_parallel):
    given_ = arguments(
        (8, 4, 1, 1), 2, 4, context_parallel=context_parallel, max_context_parallel=4
    )
    given_["job"] = replace(given_["job"], context_parallel_size=2)
    plan = planned(**given_)
    plan.validate(given_["lengths_tokens"], given_["job"], given_["plan_settings"])
    assert any(micro_batch.cp_size > 1 for micro_batch in plan.micro_batches)
    if context_parallel == "static":
        ms_RM = plan.expectation.times_2RPVM.sum(axis=(0, 2, 3))
        assert (np.diff(ms_RM) <= 0).all()
