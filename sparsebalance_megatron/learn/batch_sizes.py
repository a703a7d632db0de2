# SPDX-License-Identifier: Apache-2.0
"""Number of samples in every step: fixed, or growing with the samples consumed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from sparsebalance_megatron.plan.step_plan import PlanError


class _Phase(NamedTuple):
    """Consecutive steps of one size."""

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Global batch sizes by samples consumed, as ``--step-batch-size-schedule`` gives them.

    ``schedule`` has (samples consumed, global batch size) pairs: from so many samples on, that
    size. Steps are counted from 0, as if training had followed the schedule from its first sample.
    Within a phase all steps are of one size; a phase ends with the first step that reaches its
    threshold.
    """

    schedule: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        thresholds = [threshold for threshold, _ in self.schedule]
        rising = all(before < after for before, after in pairwise(thresholds))
        if thresholds[:1] != [0] or not rising or min(size for _, size in self.schedule) < 1:
            raise PlanError(
                f"batch sizes {self.schedule}: thresholds must rise from 0, sizes be at least 1"
            )

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """Every step has ``size`` samples."""
        return cls(schedule=((0, size),))

    @property
    def largest(self) -> int:
        """Samples of the largest step."""
        return max(size for _, size in self.schedule)

    def size_of(self, step: int) -> int:
        """Samples of a step."""
        return self._phase_of(step).size

    def first_sample(self, step: int) -> int:
        """Samples consumed before a step; ``step`` may be the one after the last."""
        phase = self._phase_of(step)
        return phase.first_sample + (step - phase.first_step) * phase.size

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Sizes of that step and of all after it, each once, in order."""
        ends = [phase.first_step for phase in self._phases[1:]]
        coming = zip(self._phases, [*ends, math.inf], strict=True)
        return tuple(dict.fromkeys(phase.size for phase, end in coming if end > step))

    def step_at(self, consumed_samples: int) -> int | None:
        """The step that begins after so many samples; None if none does."""
        phase = [each for each in self._phases if each.first_sample <= consumed_samples][-1]
        steps, rest = divmod(consumed_samples - phase.first_sample, phase.size)
        return None if rest else phase.first_step + steps

    def _phase_of(self, step: int) -> _Phase:
        return [phase for phase in self._phases if phase.first_step <= step][-1]

    @cached_property
    def _phases(self) -> tuple[_Phase, ...]:
        """Every phase that has a step."""
        phases = [_Phase(0, 0, self.schedule[0][1])]
        for threshold, size in self.schedule[1:]:
            step, consumed, last_size = phases[-1]
            steps = -(-(threshold - consumed) // last_size)
            if steps <= 0:  # the step that reached an earlier threshold reached this one too
                phases.pop()
            phases.append(_Phase(step + max(0, steps), consumed + max(0, steps) * last_size, size))
        return tuple(phases)
