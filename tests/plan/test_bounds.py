# SPDX-License-Identifier: Apache-2.0
"""Bounds: nothing beats them, they are attained, and they tell which samples cannot be hidden."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import (
    cost_model,
    costs_without_constants,
    flat,
    job_shape,
    placed,
    planned,
    random_cp_sizes,
    random_lengths,
    with_part,
)
from plan.test_lockstep_plans import arguments

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.groups import Groups, is_power_of_two
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.step_costs import step_costs

BUDGET = 6


@given(
    st.sampled_from(
        [
            *((2, 4, 2, 1), (3, 2, 1, 1), (1, 4, 2, 2), (2, 3, 4, 1), (1, 1, 2, 1)),
            *((4, 4, 2, 1), (8, 2, 1, 1), (4, 4, 2, 2), (4, 1, 1, 1)),
        ]
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["spread", "equal", "long", "tiny"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_placement_of_samples_beats_the_bound(shape, seed, kind, size, is_shared):
    """Random placements, of micro-batches that up to all ranks share, or none."""
    job = job_shape(*shape)
    lengths = random_lengths(job.places * size, seed, kind=kind)
    cost = replace(cost_model(), exchange=Exchange(bytes_per_token=512.0))
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(lengths, job, cost, scales)
    sample_2SX = costs.sample_ms(np.full((job.layers, len(lengths)), BUDGET))
    ranks = job.data_parallel_size
    most_ranks = ranks if is_shared and is_power_of_two(ranks) else 1
    bound_ms = step_bounds(sample_2SX, costs, most_ranks).bound_ms
    generator = np.random.default_rng(seed)
    for attempt in range(6):
        cp_sizes_RM = random_cp_sizes(*shape[:2], most_ranks, seed + attempt)
        places = np.unique(Groups(cp_sizes_RM).first_J)
        others = generator.choice(places, len(lengths) - len(places))
        micro_batch_of_S = generator.permutation(np.r_[places, others])
        where = placed(micro_batch_of_S, job, cp_sizes_RM)
        slowest = makespans_ms(costs.micro_batch_ms(sample_2SX, where)).max()
        assert slowest >= bound_ms * (1 - 1e-12)


def test_equal_samples_of_ranks_that_divide_experts_attain_the_bound():
    inputs = arguments((4, 3, 1, 1), 0, 4, size=1, tuning="off", positions="fixed")
    cost = with_part(inputs["cost"], (0.1, 0.2, 1e-3, 0.0, 0.0))
    expected = planned(**inputs | {"cost": cost, "lengths_tokens": [3000] * 12}).expectation
    assert expected.makespan_ms == pytest.approx(expected.lower_bound_ms)


def test_the_chain_of_a_sample_by_hand():
    """It goes through all stages and back; beside it, the first stage runs every other position."""
    forward = np.array([4.0, 1.0, 2.0, 3.0])
    sample_2SX = np.array([1.0, 2.0])[:, None, None] * forward[:, None] * np.ones(2)
    bounds = step_bounds(sample_2SX, costs_without_constants(job_shape(1, 3, 2), 4))
    # Three positions: the two cheapest samples of the others, forward, stand for those beside.
    beside = np.array([1.0 + 2.0, 2.0 + 3.0, 1.0 + 3.0, 1.0 + 2.0])
    np.testing.assert_allclose(bounds.chain_ms_S, 6.0 * forward + beside)


def test_long_samples_by_hand():
    """Three long samples and five that take no time: how those fill the pipeline does not help.

    One rank of four stages: the last stage runs the three, but not before the first has passed
    three stages, and the way back takes three more.
    """
    forward = np.array([4.0, 5.0, 6.0, *[1e-6] * 5])
    sample_2SX = np.array([1.0, 2.0])[:, None, None] * forward[:, None] * np.ones(4)
    bounds = step_bounds(sample_2SX, costs_without_constants(job_shape(1, 8, 4), 8))
    assert bounds.long_ms == pytest.approx(3 * 15.0 + 3 * 4.0 + 3 * 8.0, rel=1e-5)
    best = min(
        makespans_ms(flat(np.broadcast_to(sizes, (1, 4, 1, 8))[None] * [[[[[1.0]]]], [[[[2.0]]]]]))[
            0
        ]
        for sizes in map(np.array, set(itertools.permutations(forward.round(3), 8)))
    )
    assert bounds.bound_ms <= best
    assert bounds.long_ms == pytest.approx(bounds.bound_ms)


def test_long_samples_lie_at_the_cp_size_that_hurts_least():
    """Shared by four ranks, their ways and their work on each are a quarter."""
    forward = np.array([4.0, 5.0, 6.0, *[1e-6] * 13])
    sample_2SX = np.array([1.0, 2.0])[:, None, None] * forward[:, None] * np.ones(4)
    costs = costs_without_constants(job_shape(4, 8, 4), 16)
    costs = replace(costs, exchange=Exchange(loss=0.0))
    bounds = step_bounds(sample_2SX, costs, 4)
    received = (costs.exchange_2X * costs.lengths_tokens_S.max()).max()
    assert bounds.long_ms == pytest.approx(81.0 / 4, abs=20 * received + 1e-4)


def test_unhideable_samples_are_named():
    """Two ranks of four stages; samples take as long on every stage, and twice that backward."""

    def bounds_of(sizes_S):
        sample_2SX = np.array([1.0, 2.0])[:, None, None] * sizes_S[:, None] * np.ones(4)
        return step_bounds(sample_2SX, costs_without_constants(job_shape(2, 4, 4), 8))

    sizes_S = np.ones(8)
    assert not bounds_of(sizes_S).unhideable_S.any()
    sizes_S[6] = 5.0
    bounds = bounds_of(sizes_S)
    assert np.flatnonzero(bounds.unhideable_S).tolist() == [6]
    times = np.ones((4, 1, 1)) * sizes_S.reshape(2, 1, 1, 4)
    best = min(
        makespans_ms(flat(np.stack([times[..., order], 2 * times[..., order]]))).max()
        for order in (list(order) for order in itertools.permutations(range(4)))
    )
    assert best >= bounds.bound_ms > bounds.long_ms
