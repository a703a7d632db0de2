# SPDX-License-Identifier: Apache-2.0
"""Cost terms of a step against a loop over layers, samples and parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import FORWARD_MS, cost_model, job_shape, placed

from sparsebalance_megatron.cost.model import Part, StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_costs import step_costs

BLOCK = 64


def naive_micro_batch_ms(samples, lengths, budgets, dense, job, stage, chunk):
    """Forward ms of one micro-batch on one chunk, part by part."""
    layers = job.stage_layers[stage][chunk]
    tokens = [lengths[s] for s in samples]

    def affine(part, tokens, pairs=0.0, micro_batches=1.0):
        per = FORWARD_MS[part]
        visible = sum(oracle.pairs(t, 1 << 40, BLOCK) for t in tokens)
        values = (micro_batches, len(tokens), sum(tokens), pairs, visible)
        return sum(ms * value for ms, value in zip(per, values, strict=True))

    total = 0.0
    for layer in layers:
        total += affine(Part.LINEAR, tokens)
        is_sparse = not all(dense[layer])
        attention = (Part.ATTENTION, Part.ROUTER) if is_sparse else (Part.DENSE_ATTENTION,)
        total += sum(FORWARD_MS[part][0] for part in attention)
        for s in samples:
            pairs = oracle.pairs(lengths[s], budgets[layer][s], BLOCK)
            attention = (
                (Part.DENSE_ATTENTION,) if dense[layer][s] else (Part.ATTENTION, Part.ROUTER)
            )
            total += sum(affine(part, [lengths[s]], pairs, 0.0) for part in attention)
    if (stage, chunk) == (0, 0):
        total += affine(Part.EMBEDDING, tokens)
    if (stage, chunk) == (job.pipeline_stages - 1, job.virtual_stages - 1):
        total += affine(Part.HEAD, tokens)
    return total


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (3, 1), (2, 2)]))
def test_matches_naive_sum(seed, pipeline):
    generator = np.random.default_rng(seed)
    job = job_shape(2, 2, *pipeline)
    lengths = generator.integers(1, 2000, 6).tolist()
    budgets = generator.integers(1, 40, (job.layers, 6))
    micro_batch_of = np.array([0, 1, 2, 3, *generator.integers(0, 4, 2)])
    scale = generator.uniform(0.5, 2.0, (2, *pipeline))
    slowness = generator.uniform(0.5, 2.0, (2, pipeline[0]))
    scales = StageScales.of(scale, slowness)
    dense_LS = generator.random((job.layers, 6)) < 0.3
    dense_LS |= generator.random((job.layers, 1)) < 0.3
    costs = step_costs(lengths, job, cost_model(BLOCK), scales, dense_LS)
    times = costs.micro_batch_ms(costs.sample_ms(budgets), placed(micro_batch_of, job))
    forward, backward = times.by_micro_batch_2RPVM
    assert forward.shape == (2, *pipeline, 2)
    for d, p, v, m in np.ndindex(forward.shape):
        samples = np.flatnonzero(micro_batch_of == d * 2 + m).tolist()
        expected = (
            naive_micro_batch_ms(samples, lengths, budgets.tolist(), dense_LS, job, p, v)
            * slowness[d, p]
        )
        assert forward[d, p, v, m] == pytest.approx(expected * scale[0, p, v], rel=1e-9)
        assert backward[d, p, v, m] == pytest.approx(2 * expected * scale[1, p, v], rel=1e-9)


def test_other_dense_documents_change_all_that_follows_from_them():
    dense_LS = np.array([[True, True], [True, False], [False, False], [True, True]])
    given_ = [100, 9000], job_shape(1, 2, 2), cost_model(BLOCK), StageScales.ones(2)
    found, expected = replace(step_costs(*given_), dense_LS=dense_LS), step_costs(*given_, dense_LS)
    np.testing.assert_array_equal(found.constant_2C, expected.constant_2C)
    budgets_LS = np.full((4, 2), 8)
    np.testing.assert_array_equal(found.sample_ms(budgets_LS), expected.sample_ms(budgets_LS))


def test_stages_without_layers_cost_only_their_ends():
    job = Job(data_parallel_size=1, micro_batches=1, stage_layers=(((),), ((0, 1),), ((),)))
    costs = step_costs([100], job, cost_model(BLOCK), StageScales.ones(3))
    times = costs.micro_batch_ms(costs.sample_ms(np.full((2, 1), 4)), placed([0], job))
    forward, _ = times.by_micro_batch_2RPVM
    assert forward[0, 0, 0, 0] == pytest.approx(0.01 + 100 * 1e-5)
    assert forward[0, 2, 0, 0] == pytest.approx(0.1 + 100 * 1e-3)


def test_errors():
    model, scales = cost_model(BLOCK), StageScales.ones(1)
    with pytest.raises(PlanError, match="0 tokens"):
        step_costs([5, 0], job_shape(1, 2), model, scales)
