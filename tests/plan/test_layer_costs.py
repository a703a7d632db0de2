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


def by_chunk(costs, ms_2SL):
    """Sums over the layers of every chunk."""
    ms_2SC = np.zeros((*ms_2SL.shape[:2], costs.chunks))
    for layer, chunk in enumerate(costs.chunk_of_layer_L):
        ms_2SC[..., chunk] += ms_2SL[..., layer]
    return ms_2SC


@given(SEEDS, SHAPES)
def test_layers_and_what_is_outside_them_are_the_costs_of_chunks(seed, shape):
    costs = costs_of(shape, seed)
    layers = costs.layers
    fixed_2SC = by_chunk(costs, layers.fixed_2SL) + layers.outside_2SC
    np.testing.assert_allclose(fixed_2SC, costs.fixed_2SC, rtol=1e-12)
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (costs.job.layers, 5))
    own_2SL = layers.own_2SL(costs.sparse_pairs_LS(budgets_LS))
    sample_2SC = by_chunk(costs, own_2SL) + layers.outside_2SC
    np.testing.assert_allclose(sample_2SC, costs.sample_ms(budgets_LS), rtol=1e-12)
    sequence_2C = np.zeros_like(costs.sequence_2C) + layers.outside_sequence_2C
    for layer, chunk in enumerate(costs.chunk_of_layer_L):
        sequence_2C[:, chunk] += layers.sequence_2L[:, layer]
    np.testing.assert_allclose(sequence_2C, costs.sequence_2C, rtol=1e-12)


@given(SEEDS, SHAPES, st.sampled_from([2, 4]))
def test_layers_of_shared_samples_are_the_costs_of_shared_samples(seed, shape, cp_size):
    costs = costs_of(shape, seed)
    cp_size = min(cp_size, shape[0])
    cp_size_S = np.full(5, cp_size)
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (costs.job.layers, 5))
    layers = costs.layers.shared(costs.share_W[cp_size_S], costs.received_W[cp_size_S])
    own_2SL = layers.own_2SL(costs.sparse_pairs_LS(budgets_LS))
    expected_2SC = costs.ms_at_cp_size(costs.sample_ms(budgets_LS), cp_size_S)
    found_2SC = by_chunk(costs, own_2SL) + layers.outside_2SC
    np.testing.assert_allclose(found_2SC, expected_2SC, rtol=1e-12)


def test_a_subset_has_the_costs_of_its_samples():
    costs = costs_of((4, 2, 2, 1), 3)
    some = costs.of(slice(1, 4))
    for name in ("fixed_2SL", "outside_2SC", "exchange_2SL", "together_2SC"):
        own, whole = getattr(some.layers, name), getattr(costs.layers, name)
        assert own.tolist() == whole[:, 1:4].tolist()


def test_only_ranks_that_wait_have_costs_by_layer():
    assert costs_of((4, 2, 1, 1), 1, lockstep_ranks=1).layers is None
    alone = costs_of((1, 1, 1, 1), 1, 1, lockstep_ranks=1)
    with pytest.raises(ValueError, match="costs by layer are known only"):
        layers_of(alone, placed([0], alone.job))
