# SPDX-License-Identifier: Apache-2.0
"""Documents that layers attend to densely: what they cost, and that none is slower for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import (
    cost_model,
    coverage_curves,
    job_shape,
    plan_settings,
    planned,
    random_lengths,
)
from predict.predict_cases import SHAPE

from sparsebalance_megatron.cost.dense_length import crossing_tokens
from sparsebalance_megatron.cost.model import CostModel, Efficiency
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.layer_budgets import DENSE

BLOCK = 64
SHAPES = [(2, 4, 2, 1), (1, 4, 2, 2), (4, 3, 1, 1), (8, 2, 1, 1)]
"""Ranks, positions, stages and chunks."""


def inputs(seed, cost, *, lockstep_ranks=1, longest=2**15, **changes):
    job = job_shape(*SHAPES[seed % len(SHAPES)])
    if job.data_parallel_size % lockstep_ranks == 0:
        job = replace(job, lockstep_ranks=lockstep_ranks)
    return {
        "lengths_tokens": random_lengths(3 * job.places, seed, longest=longest),
        "job": job,
        "plan_settings": plan_settings(**changes),
        "cost": cost,
        "scales": StageScales.ones(job.pipeline_stages, job.virtual_stages),
        "coverage": coverage_curves(job.layers, 1024, seed=seed),
    }


def counted(sparse, block_size=BLOCK):
    return CostModel.analytic(SHAPE, block_size, efficiency=Efficiency(sparse=sparse))


@pytest.mark.parametrize("lockstep_ranks", [1, 2])
@pytest.mark.parametrize("segments", [1, 4])
def test_dense_documents_cost_what_they_do_in_dense_layers(lockstep_ranks, segments):
    """They are dense by their length, or since the base budget covers them."""
    most = {"max_segments": segments, "segment_tokens": 64, "tuning": "off"}
    for seed in range(4):
        for how in ({"dense_up_to_tokens": 2**12}, {"base_budget": 64}):
            ours = inputs(
                seed, cost_model(), lockstep_ranks=lockstep_ranks, longest=2**12, **most, **how
            )
            dense = plan_settings(layer_budgets="dense:all", **most)
            found, expected = planned(**ours), planned(**ours | {"plan_settings": dense})
            placed, others = (
                [(each.samples, each.rank, each.position) for each in plan.micro_batches]
                for plan in (found, expected)
            )
            assert placed == others
            assert found.expectation.makespan_ms == expected.expectation.makespan_ms


@pytest.mark.parametrize("sparse", [0.05, 0.13, 0.24, 0.36, 0.6])
def test_fixed_budgets_are_never_slower_than_dense_attention(sparse):
    """Placement is ours in 200 random jobs, some of whose ranks wait in every layer, some of whose
    layers have budgets of their own."""
    cost = counted(sparse)
    for seed in range(40):
        base = (8, 16)[seed % 2]
        choices = {"tuning": "off", "base_budget": base, "plan_ms": 40.0}
        choices["layer_budgets"] = (None, "4:0 40:1")[seed // 2 % 2]
        tokens = crossing_tokens(cost, base, 2**15)
        given = inputs(seed, cost, lockstep_ranks=(1, 2)[seed // 4 % 2], **choices)
        ours = plan_settings(**choices, dense_up_to_tokens=tokens)
        dense = plan_settings(**choices | {"layer_budgets": "dense:all"})
        found, exact = (
            planned(**given | {"plan_settings": each}).expectation.makespan_ms
            for each in (ours, dense)
        )
        assert found <= 1.005 * exact, (seed, found / exact)


def test_dense_documents_are_fixed_and_others_rise():
    given = inputs(2, counted(0.13), dense_up_to_tokens=2**12)
    plan = planned(**given)
    lengths_S = np.array(given["lengths_tokens"])
    blocks_S = -(-lengths_S // BLOCK)
    dense_LS = given["plan_settings"].dense_LS(given["job"].layers, lengths_S)
    assert 0 < dense_LS[0].sum() < len(lengths_S)
    assert (plan.budgets_LS == np.maximum(blocks_S, 8))[dense_LS].all()
    assert (plan.budgets_LS >= 8)[~dense_LS].all()
    assert plan.expectation.samples_raised > 0


def test_lengths_by_hand():
    """There are blocks of 64, layers at 8, 4 and 40 blocks, and a dense one."""
    settings = plan_settings(layer_budgets="4:1 40:2 dense:3", dense_up_to_tokens=16 * 64)
    assert settings.dense_blocks_L(4).tolist()[:3] == [16, 8, 80]
    lengths = [1, 512, 513, 1024, 1025, 5120, 5121]
    base_LS = settings.base_LS(4, lengths)
    assert base_LS.tolist() == [
        [1, 8, 9, 16, 8, 8, 8],
        [1, 8, 4, 4, 4, 4, 4],
        [1, 8, 9, 16, 17, 80, 40],
        [1, 8, 9, 16, 17, 80, 81],
    ]
    assert settings.base_L(4)[3] == DENSE
    # A length within a block counts all of it.
    assert replace(settings, dense_up_to_tokens=961).dense_blocks_L(4)[0] == 16
