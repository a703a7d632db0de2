# SPDX-License-Identifier: Apache-2.0
"""Which training samples every step gets: those that follow in the order of the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.plan.budgets.price import horizon_steps


class SampleLengths(Protocol):
    """An endless order of training samples, and their lengths in tokens."""

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Sample numbers at the places ``first`` to ``first + size`` of the order."""

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The training samples of every step, in order of arrival."""

    index: SampleLengths
    batch_sizes: BatchSizes

    def of_step(self, step: int) -> np.ndarray:
        """Sample numbers of one step."""
        return self._between(step, step + 1)

    def later_lengths_tokens(self, step: int) -> tuple[int, ...]:
        """Lengths of the samples of the later steps of the horizon that ``step`` begins."""
        later_steps = horizon_steps(self.batch_sizes.size_of(step)) - 1
        if later_steps == 0:
            return ()
        return self.lengths_tokens(self._between(step + 1, step + 1 + later_steps))

    def lengths_tokens(self, samples: np.ndarray) -> tuple[int, ...]:
        """Tokens of every sample."""
        return tuple(self.index.lengths_of(samples).tolist())

    def _between(self, step: int, end_step: int) -> np.ndarray:
        first, end = map(self.batch_sizes.first_sample, (step, end_step))
        return self.index.global_batch(first, end - first)
