# SPDX-License-Identifier: Apache-2.0
"""Samples of steps, exchanged between global batches: a partition, pure, giants side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.plan.batch_sizes import BatchSizes
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.plan.step_samples import StepSamples, assign_window


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_partition(batches, batch_size, ranks, seed):
    costs = np.random.default_rng(seed).pareto(1.2, batches * batch_size)
    shared = assign_window(costs, batches, batch_size, data_parallel_size=ranks)
    assert [len(batch) for batch in shared] == [batch_size] * batches
    assert sorted(i for batch in shared for i in batch) == list(range(len(costs)))
    assert shared == assign_window(costs.copy(), batches, batch_size, data_parallel_size=ranks)


def test_giants_meet():
    costs = [1.0] * 16
    for giant in (0, 3, 9, 14):
        costs[giant] = 100.0
    shared = assign_window(costs, 2, 8, data_parallel_size=4)
    assert sorted(sum(costs[i] == 100.0 for i in batch) for batch in shared) == [0, 4]
    alone = assign_window(costs, 2, 8)
    assert [sum(costs[i] == 100.0 for i in batch) for batch in alone] == [2, 2]


def test_giants_get_company_that_hides_them():
    """A batch with a heavier heaviest sample gets more of the rest, to within one run."""
    costs = np.r_[np.full(4, 20.0), np.full(4, 10.0), np.full(8, 6.0), np.full(16, 3.0)]
    shared = assign_window(costs, 2, 16, data_parallel_size=2)
    totals = [costs[list(batch)].sum() for batch in shared]
    heaviest = [costs[list(batch)].max() for batch in shared]
    assert heaviest == [20.0, 10.0]
    assert totals[0] > 1.4 * totals[1]
    shares = [16 * most / total for most, total in zip(heaviest, totals, strict=True)]
    assert max(shares) < 2.5, "with equal totals it is 3"


def test_window_of_one_changes_nothing():
    assert assign_window([3.0, 1.0, 2.0], 1, 3, data_parallel_size=2) == ((0, 1, 2),)


class Arrivals:
    """Samples arrive in order; the number of one is its cost."""

    def global_batch(self, first, size):
        return np.arange(first, first + size)

    def lengths_of(self, samples):
        return np.asarray(samples) % 7 + 1


def test_steps_of_a_window_share_its_samples():
    def of_steps(window):
        samples = StepSamples(
            index=Arrivals(),
            batch_sizes=BatchSizes.constant(8),
            window=window,
            data_parallel_size=2,
            sample_ms=lambda lengths: np.asarray(lengths, dtype=float),
        )
        return [sorted(samples.of_step(step).tolist()) for step in range(4)]

    arrived = [[*range(first, first + 8)] for first in (0, 8, 16, 24)]
    assert of_steps(1) == arrived
    exchanged = of_steps(2)
    assert exchanged != arrived
    for first in (0, 2):
        assert sorted(exchanged[first] + exchanged[first + 1]) == [
            *range(8 * first, 8 * first + 16)
        ]


def test_errors():
    with pytest.raises(PlanError, match="5 samples for 2 batches of 3"):
        assign_window([1.0] * 5, 2, 3)
    with pytest.raises(PlanError, match="sample 1 not finite"):
        assign_window([1.0, np.inf], 2, 1)
