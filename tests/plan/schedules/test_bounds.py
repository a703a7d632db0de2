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
from sparsebalance_megatron.plan.schedules.bounds import sample_bounds
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms
from sparsebalance_megatron.plan.schedules.wide_bounds import wide_bounds
from sparsebalance_megatron.plan.step_costs import step_costs

BUDGET = 6


def bounds_and_costs(lengths, job):
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_2SC = costs.sample_ms(np.full((job.layers, len(lengths)), BUDGET))
    return sample_bounds(sample_2SC, costs.constant_2C, job), costs, sample_2SC


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
    bounds, costs, sample_2SC = bounds_and_costs(lengths, job)
    generator = np.random.default_rng(seed)
    for _ in range(6):
        slot_of_S = generator.integers(0, job.slots, len(lengths))
        slot_of_S[generator.permutation(len(lengths))[: job.slots]] = np.arange(job.slots)
        slowest = makespans_ms(costs.slot_ms(sample_2SC, slot_of_S)).max()
        assert slowest >= bounds.bound_ms * (1 - 1e-12)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (2, 8), (4, 8)])
def test_unhideable_limit_against_every_order(stages, micro_batches):
    """Beyond the limit no order reaches perfect balance, however the rest is cut up."""
    largest = 1.05 * (micro_batches + stages - 1) / stages
    rest = (micro_batches - largest) / (micro_batches - 1)
    perfect = 3.0 * (micro_batches + stages - 1)
    for place in range(micro_batches):
        sizes = np.full(micro_batches, rest)
        sizes[place] = largest
        forward = np.broadcast_to(sizes, (1, stages, 1, micro_batches))
        assert makespans_ms(np.stack([forward, 2 * forward]))[0] > perfect


def test_the_chain_of_a_sample_by_hand():
    """Its slot goes through all stages and back; beside it, the first stage runs every other."""
    forward = np.array([4.0, 1.0, 2.0, 3.0])
    sample_2SC = np.array([1.0, 2.0])[:, None, None] * forward[:, None] * np.ones(2)
    bounds = sample_bounds(sample_2SC, np.zeros((2, 2)), job_shape(1, 3, 2))
    # Three slots: the two cheapest samples of the others, forward, stand for those beside.
    beside = np.array([1.0 + 2.0, 2.0 + 3.0, 1.0 + 3.0, 1.0 + 2.0])
    np.testing.assert_allclose(bounds.chain_ms_S, 6.0 * forward + beside)


def test_the_mean_chain_of_narrow_slots_is_that_of_samples():
    """Slots of one rank are slots like any other."""
    job = job_shape(4, 3, 2)
    lengths = random_lengths(20, 5)
    bounds, costs, sample_2SC = bounds_and_costs(lengths, job)
    assert (costs.constant_2C > 0.0).any()
    wide = wide_bounds(sample_2SC, costs, 1)
    assert wide.mean_chain_ms == pytest.approx(bounds.mean_chain_ms, rel=1e-12)
    np.testing.assert_allclose(wide.chain_ms_S, bounds.chain_ms_S, rtol=1e-12)


def test_unhideable_samples_are_named():
    """Two ranks of four stages; samples take as long on every stage, and twice that backward."""

    def bounds_of(sizes_S):
        sample_2SC = np.array([1.0, 2.0])[:, None, None] * sizes_S[:, None] * np.ones(4)
        return sample_bounds(sample_2SC, np.zeros((2, 4)), job_shape(2, 4, 4))

    sizes_S = np.ones(8)
    assert not bounds_of(sizes_S).unhideable_S.any()
    sizes_S[6] = 5.0
    bounds = bounds_of(sizes_S)
    assert np.flatnonzero(bounds.unhideable_S).tolist() == [6]
    giant = np.ones((4, 1, 1)) * sizes_S.reshape(2, 1, 1, 4)
    best = min(
        makespans_ms(np.stack([giant[..., order], 2 * giant[..., order]])).max()
        for order in (list(order) for order in itertools.permutations(range(4)))
    )
    assert best >= bounds.bound_ms > bounds.stage_ms
