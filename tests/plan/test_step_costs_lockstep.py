# SPDX-License-Identifier: Apache-2.0
"""Costs by layer, and times of lockstep groups, against loops and sums by hand.

Shape legend: S samples, C chunks of all stages, R data-parallel ranks, P pipeline stages, V virtual
stages, M micro-batches; a leading 2: forward and backward.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import (
    cost_model,
    job_shape,
    placed,
    random_cp_sizes,
    random_lengths,
    with_part,
)

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.plan.step_costs import step_costs

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 3, 1, 1), (4, 2, 2, 1), (2, 2, 2, 2), (8, 2, 1, 1)])
"""Ranks, positions, stages and chunks."""


def costs_of(shape, seed, samples=5, lockstep_ranks=2):
    """Costs of random lengths, with unequal stages, experts and some dense layers."""
    generator = np.random.default_rng(seed)
    job = replace(job_shape(*shape), lockstep_ranks=lockstep_ranks)
    scales_2PV = generator.uniform(0.5, 2.0, (2, *shape[2:]))
    slowness_RP = generator.uniform(0.8, 1.3, (shape[0], shape[2]))
    scales = replace(StageScales.of(scales_2PV), slowness_RP=slowness_RP)
    dense_LS = generator.random((job.layers, samples)) < 0.3
    lengths = random_lengths(samples, seed, longest=20000)
    row = 0.0, generator.uniform(), 1e-3 * generator.uniform(), 0.0, 0.0
    return step_costs(lengths, job, with_part(cost_model(), row), scales, dense_LS)


@given(SEEDS, SHAPES, st.sampled_from([1, 2, 4]))
def test_layers_and_what_is_outside_them_are_the_costs_of_chunks(seed, shape, cp_size):
    costs = costs_of(shape, seed)
    cp_size_S = np.full(5, min(cp_size, shape[0]))
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (costs.job.layers, 5))
    alone = replace(costs, job=replace(costs.job, lockstep_ranks=1))
    found_2SX, expected_2SC = (
        each.at_cp_size(each.sample_ms(budgets_LS), cp_size_S) for each in (costs, alone)
    )
    found_2SC = np.zeros_like(expected_2SC)
    np.add.at(found_2SC, (..., costs.chunk_of_X), found_2SX)
    np.testing.assert_allclose(costs.by_chunk(found_2SX), found_2SC, rtol=1e-12)
    np.testing.assert_allclose(found_2SC, expected_2SC, rtol=1e-12)


@given(SEEDS, SHAPES)
def test_costs_of_groups_are_those_of_samples_that_all_their_ranks_share(seed, shape):
    whole = costs_of(shape, seed)
    whole = replace(whole, job=replace(whole.job, context_parallel_size=2, lockstep_ranks=1))
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (whole.job.layers, 5))
    expected_2SC = whole.at_cp_size(whole.sample_ms(budgets_LS), np.full(5, 2))
    found_2SC = whole.of_groups.sample_ms(budgets_LS)
    np.testing.assert_allclose(found_2SC, expected_2SC, rtol=1e-12)


def placed_case(shape, seed, lockstep_ranks, most_ranks):
    """Samples in every micro-batch, and budgets."""
    generator = np.random.default_rng(seed)
    cp_sizes_RM = random_cp_sizes(*shape[:2], min(most_ranks, shape[0]), seed)
    places_RM = np.arange(shape[0] * shape[1]).reshape(cp_sizes_RM.shape)
    first_J = places_RM[np.arange(shape[0])[:, None] % cp_sizes_RM == 0]
    micro_batch_of_S = np.r_[first_J, generator.choice(first_J, 5)]
    samples = len(micro_batch_of_S)
    costs = costs_of(shape, seed, samples, lockstep_ranks)
    budgets_LS = generator.integers(1, 40, (costs.job.layers, samples))
    return costs, budgets_LS, placed(micro_batch_of_S, costs.job, cp_sizes_RM)


def naive_2RPVM(costs, budgets_LS, where):
    """A group takes, layer by layer, what its slowest member takes; on the slowest device, what a
    micro-batch costs whatever it holds and what the mean member has of experts. Of ranks that share
    a micro-batch all are as slow as the slowest."""
    job, ranks = costs.job, costs.job.lockstep_ranks
    held = {}
    for first, positions in enumerate(where.samples):
        for position, samples in enumerate(positions):
            if samples:
                cp_size = where.cp_sizes_RM[first, position]
                for rank in range(first, first + cp_size):
                    held[rank, position] = samples, cp_size
    shape = 2, job.data_parallel_size, costs.chunks, job.micro_batches
    ms_2RCM = np.zeros(shape)

    def own_ms(direction, rank, position, column):
        samples, cp_size = held[rank, position]
        cp_size_S = np.full(len(costs.lengths_tokens_S), cp_size)
        ms_2SX = costs.at_cp_size(costs.sample_ms(budgets_LS), cp_size_S)
        return sum(ms_2SX[direction, sample, column] for sample in samples)

    for direction in (0, 1):
        for rank, position in np.ndindex(job.data_parallel_size, job.micro_batches):
            group = range(rank - rank % ranks, rank - rank % ranks + ranks)
            for chunk in range(costs.chunks):
                stage, slowness = chunk // job.virtual_stages, []
                for each in group:
                    size = held[each, position][1]
                    first = each - each % size
                    slowness.append(costs.slowness_RP[first : first + size, stage].max())
                own, experts = np.split(costs.chunk_of_X, [costs.own])
                ms = sum(
                    max(
                        slow * own_ms(direction, each, position, column)
                        for slow, each in zip(slowness, group, strict=True)
                    )
                    for column in np.flatnonzero(own == chunk)
                )
                (column,) = len(own) + np.flatnonzero(experts == chunk)
                alike = costs.constant_2C[direction, chunk]
                alike += np.mean([own_ms(direction, each, position, column) for each in group])
                ms_2RCM[direction, rank, chunk, position] = ms + max(slowness) * alike
    return ms_2RCM.reshape(2, job.data_parallel_size, job.pipeline_stages, -1, job.micro_batches)


@given(SEEDS, SHAPES, st.sampled_from([1, 2, 4]))
def test_a_group_takes_the_sum_over_layers_of_its_slowest_member(seed, shape, most_ranks):
    lockstep_ranks = 2 if shape[0] < 4 else int(np.random.default_rng(seed).choice([2, 4]))
    costs, budgets_LS, where = placed_case(shape, seed, lockstep_ranks, most_ranks)
    times = costs.micro_batch_ms(costs.sample_ms(budgets_LS), where)
    found_2RPVM = np.repeat(times.by_micro_batch_2RPVM, lockstep_ranks, axis=1)
    np.testing.assert_allclose(found_2RPVM, naive_2RPVM(costs, budgets_LS, where), rtol=1e-11)


@given(
    st.sampled_from([(4, 3, 1, 1), (4, 2, 2, 2), (2, 5, 3, 1)]),
    st.sampled_from([2, 4]),
    st.integers(0, 2**32 - 1),
)
def test_experts_of_a_rank_compute_an_equal_share_of_its_groups_samples(shape, members, seed):
    ranks, positions, _, chunks = shape
    members = min(members, ranks)
    costs, budgets_LS, where = placed_case(shape, seed, members, 1)
    sample_2SX, micro_batch_of_S = costs.sample_ms(budgets_LS), where.micro_batch_of_S
    found = costs.own_ms_2RPVM(sample_2SX, where)
    held_2JX = np.zeros((2, costs.job.places, sample_2SX.shape[2]))
    for direction in range(2):
        np.add.at(held_2JX[direction], micro_batch_of_S, sample_2SX[direction])
    held_2RMX = held_2JX.reshape(2, ranks, positions, -1)
    for direction, rank, stage, chunk, position in np.ndindex(found.shape):
        number = stage * chunks + chunk
        own = np.flatnonzero(costs.chunk_of_X[: costs.own] == number)
        first = rank - rank % members
        experts = held_2RMX[direction, first : first + members, position, costs.own + number]
        expected = held_2RMX[direction, rank, position, own].sum() + experts.mean()
        expected += costs.constant_2C[direction, number]
        expected *= costs.slowness_RP[rank, stage]
        assert found[direction, rank, stage, chunk, position] == pytest.approx(expected)
