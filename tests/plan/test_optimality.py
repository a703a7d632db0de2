# SPDX-License-Identifier: Apache-2.0
"""Whole placements against the proven optimum of small cases, and against bounds where tight."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.placement import best_makespan_ms
from plan.plan_cases import cost_model, coverage_curves, job_shape, plan_settings
from plan.plan_cases import planned as plan

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.step_costs import step_costs


def planned(lengths, job, **changes):
    return plan(
        lengths_tokens=lengths,
        job=job,
        plan_settings=plan_settings(**changes),
        cost=cost_model(),
        scales=StageScales.ones(job.pipeline_stages),
        coverage=coverage_curves(job.layers),
    )


@pytest.mark.parametrize(
    ("shape", "samples"),
    [((2, 2, 2), 5), ((2, 3, 2), 6), ((3, 2, 2), 7), ((2, 3, 1), 8), ((2, 3, 2), 9)],
)
@pytest.mark.parametrize("seed", range(3))
def test_within_three_percent_of_the_optimum(shape, samples, seed):
    pytest.importorskip("ortools", reason="the oracle needs ortools: pip install ortools")
    job = job_shape(*shape)
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.uniform(np.log(500), np.log(30000), samples)).astype(int).tolist()
    costs = step_costs(lengths, job, cost_model(), StageScales.ones(job.pipeline_stages))
    sample_2SC = costs.sample_ms(np.full((job.layers, samples), 8))
    best = best_makespan_ms(*sample_2SC.tolist(), costs.constant_2C.tolist(), shape[0], shape[1])
    assert best is not None, "CP-SAT proved no optimum in time"
    found = planned(lengths, job, tuning="off").expectation.makespan_ms
    assert best * (1 - 1e-3) <= found <= best * 1.03


@pytest.mark.parametrize("seed", range(4))
def test_within_five_percent_of_the_bound_below_the_unhideable_limit(seed):
    job = job_shape(4, 16, 4)
    lengths = np.random.default_rng(seed).integers(2000, 12000, 64).tolist()
    assert max(lengths) / np.mean(lengths) < (16 + 4 - 1) / 4
    expected = planned(lengths, job).expectation
    assert expected.makespan_ms <= 1.05 * expected.lower_bound_ms
