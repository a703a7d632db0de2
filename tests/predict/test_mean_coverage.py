# SPDX-License-Identifier: Apache-2.0
"""Mean coverage over the steps of a run is that of base budgets, also where steps differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import cost_model, job_shape, plan_settings
from predict.predict_cases import memory_of

from sparsebalance_megatron.predict.workload import Workload, prior_coverage

STEPS, LONGEST, BLOCK = 64, 10_000, 64


def lengths(kind: str, samples: int) -> np.ndarray:
    """[steps, samples] tokens: alike within each step, as in batches grouped by length, or not."""
    generator = np.random.default_rng(1)
    if kind == "equal":
        return np.repeat(generator.integers(1, LONGEST, (STEPS, 1)), samples, axis=1)
    return generator.integers(1, LONGEST, (STEPS, samples))


@pytest.mark.parametrize("kind", ["equal", "uniform"])
@pytest.mark.parametrize(
    ("ranks", "stages", "micro_batches"), [(2, 1, 1), (2, 1, 4), (2, 1, 8), (1, 4, 4)]
)
def test_it_is_held_within_0_005_in_no_more_time(
    ranks: int, stages: int, micro_batches: int, kind: str
) -> None:
    batches = lengths(kind, ranks * micro_batches)
    job = job_shape(ranks, micro_batches, stages)
    tuned = Workload(
        batches=tuple(map(tuple, batches.tolist())),
        job=job,
        plan_settings=plan_settings(coverage_target="base", base_budget=32, plan_ms=2.0),
        cost=cost_model(BLOCK),
        coverage=prior_coverage(job.layers, -(-LONGEST // BLOCK)),
        memory=memory_of(job),
    )
    fixed = replace(tuned, plan_settings=replace(tuned.plan_settings, tuning="off"))
    (coverage, ms), (at_base, base_ms) = (
        np.array(
            [
                (step.plan.expectation.coverage_mean, step.plan.expectation.makespan_ms)
                for step in workload.planned_steps()
            ]
        ).mean(axis=0)
        for workload in (tuned, fixed)
    )
    assert coverage >= at_base - 0.005
    assert ms < base_ms
