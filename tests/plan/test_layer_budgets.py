# SPDX-License-Identifier: Apache-2.0
"""Plans of models whose layers differ in their base budgets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import (
    DEFAULT_TUNING,
    cost_model,
    coverage_curves,
    job_shape,
    plan_settings,
    planned,
    random_lengths,
)

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.layer_budgets import DENSE, layer_budgets_text

SHAPES = st.sampled_from([(2, 4, 2, 1), (1, 4, 2, 2), (3, 2, 1, 1)])
TUNINGS = st.sampled_from(["off", "anchor", DEFAULT_TUNING])


def arguments(shape, seed, **changes):
    job = job_shape(*shape)
    return {
        "lengths_tokens": random_lengths(2 * job.places, seed, longest=20000),
        "job": job,
        "plan_settings": plan_settings(**changes),
        "cost": cost_model(),
        "scales": StageScales.ones(job.pipeline_stages, job.virtual_stages),
        "coverage": coverage_curves(job.layers, 400, seed=seed),
    }


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(0, 999), TUNINGS, st.booleans())
def test_no_layer_falls_below_its_floor_and_dense_ones_stay(shape, seed, tuning, segments):
    generator = np.random.default_rng(seed)
    layers = job_shape(*shape).layers
    base_L = generator.choice([2, 8, 30, DENSE], layers)
    given_ = arguments(
        *(shape, seed),
        tuning=tuning,
        layer_budgets=layer_budgets_text(dict(enumerate(base_L.tolist()))),
        max_segments=4 if segments and shape[3] == 1 else 1,
    )
    plan = planned(**given_)
    lengths_S = np.array(given_["lengths_tokens"])
    blocks_S = -(-lengths_S // 64)
    budgets_LS, curves = plan.budgets_LS, given_["coverage"]
    base_LS = np.minimum(base_L[:, None], blocks_S)
    lost_LS = curves.coverage_LS(blocks_S, base_LS) - curves.coverage_LS(blocks_S, budgets_LS)
    assert lost_LS.max() <= given_["plan_settings"].coverage_threshold + 1e-9
    dense_L = base_L == DENSE
    assert (budgets_LS[dense_L] == blocks_S).all()
    if tuning == "off":
        assert (np.minimum(budgets_LS, blocks_S) == base_LS).all()
    expected = plan.expectation
    assert expected.lower_bound_ms <= expected.makespan_ms * (1 + 1e-12)
    assert expected.coverage_mean == pytest.approx(
        curves.coverage_LS(blocks_S, budgets_LS).mean(), rel=1e-9
    )
    if dense_L.all():
        assert expected.samples_cut == expected.samples_raised == 0
        assert (expected.coverage_mean, expected.work_ratio) == (1.0, pytest.approx(1.0))


@pytest.mark.parametrize("tuning", ["anchor", DEFAULT_TUNING])
def test_the_base_budget_for_every_layer_is_no_change(tuning):
    given_ = arguments((2, 4, 2, 1), 3, tuning=tuning)
    named = replace(given_["plan_settings"], base_budget=1, layer_budgets="8:0-3")
    assert planned(**given_).digest() == planned(**given_ | {"plan_settings": named}).digest()


def test_layers_that_the_job_does_not_have():
    with pytest.raises(ConfigError, match="names layer 4"):
        planned(**arguments((2, 4, 2, 1), 0, layer_budgets="dense:4"))
