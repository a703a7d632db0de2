# SPDX-License-Identifier: Apache-2.0
"""Cost terms of a step against a loop over layers, samples and parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import FORWARD_MS, cost_model, job_shape, placed

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.model import Part, StageScales
from sparsebalance_megatron.cost.parts import SegmentCost
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


@pytest.mark.parametrize(("heads", "cp_size", "is_slower"), [(4, 4, False), (2, 4, True)])
def test_dense_documents_take_longer_where_heads_do_not_travel(heads, cp_size, is_slower):
    """The time grows by the rank's share; that of documents with lists does not."""
    job = job_shape(cp_size, 1, 2)
    dense_LS = np.ones((job.layers, 2), dtype=bool)
    dense_LS[0, 1] = False
    exchange = Exchange(query_heads=heads, kv_heads=heads, heads_within=cp_size, loss=0.1)
    as_fast, slower = (
        step_costs(
            *([900, 5000], job),
            replace(cost_model(BLOCK), exchange=exchange, segments=SegmentCost(dense_slowness=by)),
            *(StageScales.ones(2, 1), dense_LS),
        )
        for by in (1.0, 1.5)
    )
    sample_2SX = as_fast.sample_ms(np.full((job.layers, 2), 8))
    cp_size_S = np.array([cp_size, cp_size])
    more_2S = (
        slower.at_cp_size(sample_2SX, cp_size_S) - as_fast.at_cp_size(sample_2SX, cp_size_S)
    ).sum(axis=2)
    pairs_S = [oracle.pairs(tokens, 1 << 40, BLOCK) for tokens in (900, 5000)]
    visible_S = dense_LS.sum(axis=0) * pairs_S
    each_ms = 0.5 * FORWARD_MS[Part.DENSE_ATTENTION][-1] * 1.1 / cp_size * is_slower
    expected_2S = each_ms * np.outer([1, 2], visible_S)
    np.testing.assert_allclose(more_2S, expected_2S, rtol=1e-9, atol=1e-12)
    grouped = replace(job, context_parallel_size=cp_size)
    alone, in_groups = (replace(each, job=grouped).of_groups for each in (as_fast, slower))
    of_groups_2S = (in_groups.fixed_2SX - alone.fixed_2SX).sum(axis=2)
    np.testing.assert_allclose(of_groups_2S, expected_2S, rtol=1e-9, atol=1e-12)


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
