# SPDX-License-Identifier: Apache-2.0
"""Costs layer by layer add up to those of chunks, also on each of the ranks that share samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, placed, random_lengths

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.lockstep_times import layers_of
from sparsebalance_megatron.plan.step_costs import step_costs

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 2, 1, 1), (4, 2, 2, 1), (2, 2, 2, 2)])
"""Ranks, positions, stages and chunks."""


def costs_of(shape, seed, samples=5, lockstep_ranks=2):
    """Costs of random lengths, with unequal stages and some dense layers."""
    generator = np.random.default_rng(seed)
    job = replace(job_shape(*shape), lockstep_ranks=lockstep_ranks)
    scales_2PV = generator.uniform(0.5, 2.0, (2, *shape[2:]))
    slowness_RP = generator.uniform(0.8, 1.3, (shape[0], shape[2]))
    scales = replace(StageScales.of(scales_2PV), slowness_RP=slowness_RP)
    dense_LS = generator.random((job.layers, samples)) < 0.3
    lengths = random_lengths(samples, seed, longest=20000)
    return step_costs(lengths, job, cost_model(), scales, dense_LS)


def by_chunk(costs, values_X):
    """Sums over the columns of every chunk, without experts."""
    values_C = np.zeros((*values_X.shape[:-1], costs.chunks))
    own = costs.layers.own_columns
    np.add.at(values_C, (..., costs.layers.chunk_of_X[:own]), values_X[..., :own])
    return values_C


@given(SEEDS, SHAPES)
def test_layers_and_what_is_outside_them_are_the_costs_of_chunks(seed, shape):
    costs = costs_of(shape, seed)
    layers = costs.layers
    np.testing.assert_allclose(by_chunk(costs, layers.fixed_2SX), costs.fixed_2SC, rtol=1e-12)
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (costs.job.layers, 5))
    sample_2SC = by_chunk(costs, layers.ms_2SX(costs.sparse_pairs_LS(budgets_LS)))
    np.testing.assert_allclose(sample_2SC, costs.sample_ms(budgets_LS), rtol=1e-12)
    np.testing.assert_allclose(by_chunk(costs, layers.sequence_2X), costs.sequence_2C, rtol=1e-12)


@given(SEEDS, SHAPES, st.sampled_from([2, 4]))
def test_layers_of_shared_samples_are_the_costs_of_shared_samples(seed, shape, cp_size):
    costs = costs_of(shape, seed)
    cp_size = min(cp_size, shape[0])
    cp_size_S = np.full(5, cp_size)
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (costs.job.layers, 5))
    layers = costs.layers.shared(costs.share_W[cp_size_S], costs.received_W[cp_size_S])
    expected_2SC = costs.ms_at_cp_size(costs.sample_ms(budgets_LS), cp_size_S)
    found_2SC = by_chunk(costs, layers.ms_2SX(costs.sparse_pairs_LS(budgets_LS)))
    np.testing.assert_allclose(found_2SC, expected_2SC, rtol=1e-12)


def test_only_ranks_that_wait_have_costs_by_layer():
    assert costs_of((4, 2, 1, 1), 1, lockstep_ranks=1).layers is None
    alone = costs_of((1, 1, 1, 1), 1, 1, lockstep_ranks=1)
    with pytest.raises(ValueError, match="costs by layer are known only"):
        layers_of(alone, placed([0], alone.job))
