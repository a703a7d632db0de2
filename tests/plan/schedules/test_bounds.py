# SPDX-License-Identifier: Apache-2.0
"""Bounds: nothing beats them, they are attained, and they tell which samples cannot be hidden."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, random_lengths

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.schedules.bounds import (
    micro_batch_bounds,
    sample_bounds,
    unhideable_limit,
)
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms, schedule_name
from sparsebalance_megatron.plan.step_costs import step_costs

BUDGET = 6


def bounds_and_costs(lengths, job):
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_ms = costs.sample_ms(np.full((job.layers, len(lengths)), BUDGET))
    bounds = sample_bounds(
        *sample_ms,
        costs.constant_forward_C,
        costs.constant_backward_C,
        data_parallel_size=job.data_parallel_size,
        micro_batches=job.micro_batches,
        virtual_stages=job.virtual_stages,
    )
    return bounds, costs, sample_ms


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, 4, 2, 1), (3, 2, 1, 1), (1, 4, 2, 2), (2, 3, 4, 1), (1, 1, 2, 1)]),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["spread", "equal", "giant", "tiny"]),
    st.integers(1, 3),
)
def test_no_placement_of_samples_beats_the_bound(shape, seed, kind, size):
    job = job_shape(*shape)
    lengths = random_lengths(job.slots * size, seed, kind=kind)
    bounds, costs, sample_ms = bounds_and_costs(lengths, job)
    schedule = schedule_name(job.pipeline_stages, job.virtual_stages)
    generator = np.random.default_rng(seed)
    for _ in range(6):
        slot_of_S = generator.integers(0, job.slots, len(lengths))
        slot_of_S[generator.permutation(len(lengths))[: job.slots]] = np.arange(job.slots)
        times = costs.slot_ms(*sample_ms, slot_of_S)
        slowest = makespans_ms(*times, schedule=schedule).max()
        assert slowest >= bounds.bound_ms * (1 - 1e-12)
        assert slowest >= micro_batch_bounds(*times).bound_ms * (1 - 1e-12)


def test_one_sample_per_slot_is_bounded_as_a_micro_batch():
    job = job_shape(2, 4, 2)
    lengths = random_lengths(8, 3)
    bounds, costs, sample_ms = bounds_and_costs(lengths, job)
    fixed = micro_batch_bounds(*costs.slot_ms(*sample_ms, np.arange(8)))
    assert bounds.stage_ms == pytest.approx(fixed.stage_ms)
    assert bounds.mean_chain_ms == pytest.approx(fixed.mean_chain_ms)
    assert bounds.chain_ms_I == pytest.approx(fixed.chain_ms_I)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (2, 8), (4, 8)])
def test_unhideable_limit_against_every_order(stages, micro_batches):
    """Beyond the limit no order reaches perfect balance, however the rest is cut up."""
    limit = unhideable_limit(stages, micro_batches)
    assert limit == (micro_batches + stages - 1) / stages
    largest = 1.05 * limit
    rest = (micro_batches - largest) / (micro_batches - 1)
    perfect = 3.0 * (micro_batches + stages - 1)
    for place in range(micro_batches):
        sizes = np.full(micro_batches, rest)
        sizes[place] = largest
        forward = np.broadcast_to(sizes, (1, stages, 1, micro_batches))
        assert makespans_ms(forward, 2 * forward)[0] > perfect


def test_unhideable_samples_are_named():
    even = np.ones((2, 4, 1, 4))
    assert not micro_batch_bounds(even, 2 * even).unhideable_I.any()
    giant = even.copy()
    giant[1, :, :, 2] = 5.0
    named = micro_batch_bounds(giant, 2 * giant).unhideable_I
    assert np.flatnonzero(named).tolist() == [6]
    best = min(
        makespans_ms(giant[..., order], 2 * giant[..., order]).max()
        for order in (list(order) for order in itertools.permutations(range(4)))
    )
    bounds = micro_batch_bounds(giant, 2 * giant)
    assert best >= bounds.bound_ms > bounds.stage_ms
