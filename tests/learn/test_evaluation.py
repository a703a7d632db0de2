# SPDX-License-Identifier: Apache-2.0
"""Evaluation steps: order of arrival, at base budgets or at none."""

from __future__ import annotations

import numpy as np
import pytest
from plan.plan_cases import cost_model, coverage_curves, job_shape, policy, random_lengths

from sparsebalance_megatron.learn.scheduler import evaluation_scheduler


class InOrder:
    """Samples in the order of their numbers."""

    def __init__(self, lengths_tokens: list[int]) -> None:
        self.lengths_tokens = np.array(lengths_tokens)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return self.lengths_tokens[samples]


@pytest.mark.parametrize("dense", [False, True])
def test_evaluation_is_arrival_at_one_budget(dense: bool) -> None:
    job = job_shape(2, 4, 2)
    coverage = coverage_curves(job.layers, seed=2)
    schedule = evaluation_scheduler(
        job=job,
        policy=policy(),
        cost=cost_model(),
        coverage=coverage,
        index=InOrder(random_lengths(32, 2)),
        global_batch_size=16,
        dense=dense,
        clock=lambda: 0.0,
    )
    planned = schedule.planned(1)
    plan = planned.plan
    assert plan.batching == "arrival"
    assert planned.samples.tolist() == list(range(16, 32))
    assert plan.for_rank(1).micro_batches[0].samples == (2, 3)
    budget = coverage.max_blocks if dense else policy().base_budget
    assert all((micro_batch.budgets_LS == budget).all() for micro_batch in plan.micro_batches)
