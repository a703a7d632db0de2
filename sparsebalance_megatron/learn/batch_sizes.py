# SPDX-License-Identifier: Apache-2.0
"""How many samples every step has: a fixed number, or one that grows with the samples consumed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sparsebalance_megatron.plan.step_plan import PlanError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Global batch sizes by samples consumed, as ``--step-batch-size-schedule`` gives them.

    Steps are counted from 0, as if training had followed the schedule from its first sample. Within
    a phase all steps are of one size; a phase ends with the first step that reaches its threshold.

    Attributes:
        schedule: (samples consumed, global batch size) pairs: from so many samples on, that size.

    Raises:
        PlanError: if it does not begin with 0, thresholds do not rise, or a size is below 1.
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
        return self._phase_of(step)[2]

    def first_sample(self, step: int) -> int:
        """Samples consumed before a step; ``step`` may be the one after the last."""
        first_step, first_sample, size = self._phase_of(step)
        return first_sample + (step - first_step) * size

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Sizes of that step and of all after it, each once, in order."""
        phases = self._phases()
        ends = [first_step for first_step, _, _ in phases[1:]]
        coming = (
            size for (_, _, size), end in zip(phases, [*ends, step + 1], strict=True) if end > step
        )
        return tuple(dict.fromkeys(coming))

    def step_at(self, consumed_samples: int) -> int | None:
        """The step that begins after so many samples; None if none does."""
        found = 0, 0, self.schedule[0][1]
        for phase in self._phases():
            if phase[1] > consumed_samples:
                break
            found = phase
        first_step, first_sample, size = found
        steps, rest = divmod(consumed_samples - first_sample, size)
        return None if rest else first_step + steps

    def _phase_of(self, step: int) -> tuple[int, int, int]:
        found = 0, 0, self.schedule[0][1]
        for phase in self._phases():
            if phase[0] > step:
                break
            found = phase
        return found

    def _phases(self) -> list[tuple[int, int, int]]:
        """(first step, samples consumed before it, size) of every phase that has a step."""
        phases, step, consumed = [], 0, 0
        ends = [threshold for threshold, _ in self.schedule[1:]]
        for (_, size), end in zip(self.schedule, [*ends, None], strict=True):
            if end is not None and end <= consumed:
                continue
            phases.append((step, consumed, size))
            if end is not None:
                steps = -(-(end - consumed) // size)
                step, consumed = step + steps, consumed + steps * size
        return phases
