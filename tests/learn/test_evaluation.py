# SPDX-License-Identifier: Apache-2.0
"""Evaluation steps: placed as in training, at base budgets or at none, and never refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan.plan_cases import cost_model, coverage_curves, job_shape, plan_settings, random_lengths

from sparsebalance_megatron.learn.scheduler import evaluation_scheduler
from sparsebalance_megatron.plan.step_plan import StepPlan


class InOrder:
    """Samples in the order of their numbers."""

    def __init__(self, lengths_tokens: list[int]) -> None:
        self.lengths_tokens = np.array(lengths_tokens)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return self.lengths_tokens[samples]


def planned(lengths: list[int], *, dense: bool = False, ranks: int = 2, **choices: Any) -> StepPlan:
    """The second step of 16 samples, of four micro-batches on every rank."""
    job = job_shape(ranks, 4, 2)
    schedule = evaluation_scheduler(
        job=job,
        plan_settings=plan_settings(**choices),
        cost=cost_model(),
        coverage=coverage_curves(job.layers, seed=2),
        index=InOrder(lengths),
        global_batch_size=16,
        dense=dense,
        clock=lambda: 0.0,
    )
    found = schedule.planned(1)
    assert found.samples.tolist() == list(range(16, 32))
    return found.plan


@pytest.mark.parametrize("dense", [False, True])
def test_evaluation_is_balanced_at_one_budget(dense: bool) -> None:
    lengths = random_lengths(32, 2)
    plan = planned(lengths, dense=dense)
    arrived = planned(lengths, dense=dense, batching="arrival")
    assert plan.expectation.makespan_ms < arrived.expectation.makespan_ms
    budget = coverage_curves(2, seed=2).max_blocks if dense else plan_settings().base_budget
    assert all((micro_batch.budgets_LS == budget).all() for micro_batch in plan.micro_batches)


def test_a_sample_above_the_cap_lies_on_several_ranks() -> None:
    lengths = [200] * 31 + [1900]
    plan = planned(
        lengths, max_tokens_per_micro_batch=1000, max_context_parallel=2, context_parallel="dynamic"
    )
    assert max(micro_batch.cp_size for micro_batch in plan.micro_batches) == 2
    assert plan.rank_tokens_RM().max() <= 1000


@pytest.mark.parametrize("batching", ["makespan", "arrival", "length"])
def test_a_batch_that_fits_under_no_cap_runs_above_it(batching: str) -> None:
    with pytest.warns(UserWarning, match="above the cap"):
        plan = planned([500] * 32, max_tokens_per_micro_batch=900, batching=batching)
    assert plan.rank_tokens_RM().max() == 1000


def test_samples_that_arrive_unevenly_keep_the_cap() -> None:
    """Two samples of a micro-batch in order of arrival are above it."""
    lengths = [100, 100] * 8 + [600, 600, 100, 100] * 4
    assert planned(lengths, max_tokens_per_micro_batch=800).rank_tokens_RM().max() <= 800
