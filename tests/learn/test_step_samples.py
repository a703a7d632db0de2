# SPDX-License-Identifier: Apache-2.0
"""Samples of steps: those that arrive next, each once."""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.step_samples import StepSamples
from sparsebalance_megatron.plan.budgets.price import horizon_steps


class Arrivals:
    """Samples arrive in order; a sample's length follows from its number."""

    def global_batch(self, first, size):
        assert size > 0
        return np.arange(first, first + size)

    def lengths_of(self, samples):
        return np.asarray(samples) % 7 + 1


def test_steps_take_samples_in_order_also_where_batches_grow():
    samples = StepSamples(index=Arrivals(), batch_sizes=BatchSizes(schedule=((0, 8), (16, 12))))
    found = [samples.of_step(step).tolist() for step in range(4)]
    assert found == [[*range(8)], [*range(8, 16)], [*range(16, 28)], [*range(28, 40)]]


def test_later_lengths_are_those_of_the_rest_of_the_horizon():
    samples = StepSamples(index=Arrivals(), batch_sizes=BatchSizes.constant(8))
    later = (horizon_steps(8) - 1) * 8
    assert later > 0
    assert samples.later_lengths_tokens(3) == tuple(n % 7 + 1 for n in range(32, 32 + later))
    large = StepSamples(index=Arrivals(), batch_sizes=BatchSizes.constant(4096))
    assert large.later_lengths_tokens(3) == ()
