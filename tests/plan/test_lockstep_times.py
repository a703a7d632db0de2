# SPDX-License-Identifier: Apache-2.0
"""Times of lockstep groups, against a loop over groups, positions, layers and members."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, placed, random_cp_sizes, with_experts
from plan.test_layer_costs import SEEDS, costs_of

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.lockstep_times import group_times
from sparsebalance_megatron.plan.step_costs import step_costs

SHAPES = st.sampled_from([(4, 3, 1, 1), (4, 2, 2, 1), (2, 2, 2, 2), (8, 2, 1, 1)])
"""Ranks, positions, stages and chunks."""


def placed_case(shape, seed, lockstep_ranks, widest):
    """Samples in every micro-batch, budgets and experts' times."""
    generator = np.random.default_rng(seed)
    cp_sizes_RM = random_cp_sizes(*shape[:2], min(widest, shape[0]), seed)
    places_RM = np.arange(shape[0] * shape[1]).reshape(cp_sizes_RM.shape)
    first_J = places_RM[np.arange(shape[0])[:, None] % cp_sizes_RM == 0]
    micro_batch_of_S = np.r_[first_J, generator.choice(first_J, 5)]
    samples = len(micro_batch_of_S)
    costs = costs_of(shape, seed, samples, lockstep_ranks)
    together_2SC = generator.uniform(0.0, 1.0, costs.fixed_2SC.shape)
    costs = with_experts(costs, together_2SC)
    budgets_LS = generator.integers(1, 40, (costs.job.layers, samples))
    return costs, budgets_LS, placed(micro_batch_of_S, costs.job, cp_sizes_RM)


def naive_2RPVM(costs, budgets_LS, where):
    """A group takes, layer by layer, what its slowest member takes; on the slowest device, what a
    micro-batch costs whatever it holds and what the mean member has of experts."""
    job, size = costs.job, costs.job.lockstep_ranks
    pairs_LS = costs.sparse_pairs_LS(budgets_LS)
    held = {}
    for first, positions in enumerate(where.samples):
        for position, samples in enumerate(positions):
            if samples:
                cp_size = where.cp_sizes_RM[first, position]
                for rank in range(first, first + cp_size):
                    held[rank, position] = samples, cp_size
    shape = 2, job.data_parallel_size, costs.chunks, job.micro_batches
    ms_2RCM = np.zeros(shape)

    def own_ms(direction, rank, position, part):
        samples, cp_size = held[rank, position]
        on_it = costs.layers
        if cp_size > 1:
            cp_size_S = np.full(len(costs.lengths_tokens_S), cp_size)
            on_it = on_it.shared(costs.share_W[cp_size_S], costs.received_W[cp_size_S])
        values = part(on_it)[direction]
        return sum(values[sample] for sample in samples)

    for direction in (0, 1):
        for rank, position in np.ndindex(job.data_parallel_size, job.micro_batches):
            group = range(rank - rank % size, rank - rank % size + size)
            for chunk in range(costs.chunks):
                stage = chunk // job.virtual_stages
                slowness = [costs.slowness_RP[each, stage] for each in group]

                def slowest(part, slowness=slowness, group=group, at=position, d=direction):
                    return max(
                        slow * own_ms(d, each, at, part)
                        for slow, each in zip(slowness, group, strict=True)
                    )

                alike = costs.constant_2C[direction, chunk]
                ms = 0.0
                own = costs.layers.chunk_of_X[: costs.layers.own_columns]
                for column in np.flatnonzero(own == chunk):
                    ms += slowest(lambda on_it, column=column: on_it.ms_2SX(pairs_LS)[..., column])
                alike += np.mean(
                    [
                        own_ms(
                            direction,
                            each,
                            position,
                            lambda on_it, chunk=chunk: on_it.together_2SC[..., chunk],
                        )
                        for each in group
                    ]
                )
                ms_2RCM[direction, rank, chunk, position] = ms + max(slowness) * alike
    return ms_2RCM.reshape(2, job.data_parallel_size, job.pipeline_stages, -1, job.micro_batches)


@given(SEEDS, SHAPES, st.sampled_from([1, 2, 4]))
def test_a_group_takes_the_sum_over_layers_of_its_slowest_member(seed, shape, widest):
    lockstep_ranks = 2 if shape[0] < 4 else int(np.random.default_rng(seed).choice([2, 4]))
    costs, budgets_LS, where = placed_case(shape, seed, lockstep_ranks, widest)
    times = group_times(costs, budgets_LS, where)
    assert times.lockstep_ranks == lockstep_ranks
    expected_2RPVM = naive_2RPVM(costs, budgets_LS, where)
    np.testing.assert_allclose(times.by_micro_batch_2RPVM, expected_2RPVM, rtol=1e-11)


@given(SEEDS, SHAPES)
def test_a_group_takes_at_least_what_each_member_takes_alone(seed, shape):
    costs, budgets_LS, where = placed_case(shape, seed, 2, 1)
    costs = with_experts(costs, np.zeros_like(costs.fixed_2SC))
    alone = costs.micro_batch_ms(costs.sample_ms(budgets_LS), where).by_micro_batch_2RPVM
    group = group_times(costs, budgets_LS, where).by_micro_batch_2RPVM
    largest = alone.reshape(2, -1, 2, *alone.shape[2:]).max(axis=2).repeat(2, axis=1)
    assert (group >= largest * (1 - 1e-12)).all()


def test_equal_members_take_what_one_takes():
    """Without differences there is nothing to wait for."""
    job = replace(job_shape(4, 2), lockstep_ranks=4)
    costs = step_costs([3000] * 8, job, cost_model(), StageScales.ones(1, 1))
    budgets_LS = np.full((job.layers, 8), 9)
    where = placed(np.arange(8), job)
    found, alone = (
        times.by_micro_batch_2RPVM
        for times in (
            group_times(costs, budgets_LS, where),
            costs.micro_batch_ms(costs.sample_ms(budgets_LS), where),
        )
    )
    assert found.ravel().tolist() == pytest.approx(alone.ravel().tolist(), rel=1e-12)
