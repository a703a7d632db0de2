# SPDX-License-Identifier: Apache-2.0
"""Local search: a permutation under the cap, never slower, finds what exhaustive search finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import cost_model, flat, job_shape, random_lengths

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.placement.balance import arrival
from sparsebalance_megatron.plan.placement.packed_search import improve_packed
from sparsebalance_megatron.plan.placement.search import _Search, improve
from sparsebalance_megatron.plan.step_costs import step_costs


def searched(lengths, job, cap, plan_ms=20.0, search=improve):
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_2SC = costs.sample_ms(np.full((job.layers, len(lengths)), 8))
    before = arrival(lengths, job, cap)
    after = search(before, costs, sample_2SC, cap_tokens=cap, plan_ms=plan_ms)
    times = [
        costs.micro_batch_ms(sample_2SC, Arrangement.of_groups(placement))
        for placement in (before, after)
    ]
    return after, times


def in_every_order(times, orders):
    """Makespans of the only rank with its positions in these orders."""
    times_2PVM = times.by_micro_batch_2RPVM[:, 0]
    return makespans_ms(flat(np.stack([times_2PVM[..., order] for order in orders], axis=1)))


@pytest.mark.parametrize("search", [improve, improve_packed])
@given(
    st.sampled_from([(2, 4, 2, 1), (3, 2, 1, 1), (1, 4, 2, 2), (4, 1, 4, 1)]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_legal_and_never_slower(search, shape, seed, size):
    job = job_shape(*shape)
    lengths = random_lengths(job.places * size, seed)
    fits = arrival(lengths, job, 1 << 40)
    cap = max(sum(lengths[s] for s in micro_batch) for rank in fits for micro_batch in rank)
    after, (old, new) = searched(lengths, job, cap, search=search)
    micro_batches = [micro_batch for rank in after for micro_batch in rank]
    assert all(len(rank) == job.micro_batches for rank in after)
    assert sorted(sample for micro_batch in micro_batches for sample in micro_batch) == list(
        range(len(lengths))
    )
    assert all(micro_batches)
    assert all(sum(lengths[sample] for sample in each) <= cap for each in micro_batches)
    assert makespans_ms(new).max() <= makespans_ms(old).max() * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_order_is_near_the_best_of_all_orders(seed):
    job = job_shape(1, 6, 3)
    lengths = np.random.default_rng(seed).integers(500, 20000, 6).tolist()
    _, (old, new) = searched(lengths, job, 1 << 40)
    orders = [list(order) for order in itertools.permutations(range(6))]
    every = in_every_order(old, orders)
    found = makespans_ms(new)[0]
    assert every.min() * (1 - 1e-12) <= found <= every.min() * 1.02
    assert every.max() > every.min() * 1.05


def test_the_only_move_there_is():
    """Two samples on two ranks can only change places, which gains nothing."""
    after, _ = searched([5000, 10], job_shape(2, 1), 1 << 40)
    assert after == (((0,),), ((1,),))


def loads(lengths, placement):
    return [sum(lengths[sample] for sample in each) for rank in placement for each in rank]


def test_the_sample_that_arrived_first_counts_like_any_other():
    """It is long and cheap: the rank with most work could take it, were there room for it."""
    lengths, sample_ms = [5000, 1000, 4000, 100], np.array([3.0, 6.0, 5.0, 1.0])
    before = (((1, 2),), ((0, 3),))
    costs = step_costs(lengths, job_shape(2, 1), cost_model(), StageScales.ones(1))
    sample_2SC = np.broadcast_to(sample_ms[:, None], (2, 4, 1))
    for cap, expected in ((6200, [6.0, 9.0]), (9000, [7.0, 8.0])):
        after = improve(before, costs, sample_2SC, cap_tokens=cap, plan_ms=20.0)
        assert max(loads(lengths, after)) <= cap
        assert sorted(loads(sample_ms, after)) == expected


def test_a_micro_batch_is_not_filled_by_a_token_too_much():
    """Nothing but what does not fit would relieve the slower rank."""
    lengths = [4000, 1000, 4001]
    before = (((0, 1),), ((2,),))
    job = job_shape(2, 1)
    scales = StageScales.of(np.ones((2, 1, 1)), np.array([[2.0], [1.0]]))
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_2SC = costs.sample_ms(np.full((job.layers, len(lengths)), 8))
    for cap, expected in ((5000, [5000, 4001]), (5001, [4000, 5001])):
        after = improve(before, costs, sample_2SC, cap_tokens=cap, plan_ms=20.0)
        assert loads(lengths, after) == expected


def test_the_tokens_of_micro_batches_are_known_after_every_trade():
    lengths = random_lengths(24, 3)
    job = job_shape(3, 2)
    costs = step_costs(lengths, job, cost_model(), StageScales.ones(1))
    sample_2SC = costs.sample_ms(np.full((job.layers, len(lengths)), 8))
    search = _Search(arrival(lengths, job, 1 << 40), costs, sample_2SC, 1 << 40, 5.0)
    while search.exchange():
        pass
    assert search.used_RM.reshape(-1).tolist() == loads(lengths, search.ranks)
