# SPDX-License-Identifier: Apache-2.0
"""Plans the steps of a run whose samples follow from an index, one step ahead on a thread.

While step t runs, step t + 1 is planned from what was known when t began. That holds however fast
planning is, so that all ranks make the same plan.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_planner import Knowledge, StateError, StepPlanner
from sparsebalance_megatron.plan.job import Job, whole_parts

_PLANS_KEPT = 2
"""The step that runs and the one after it."""


class Phase(NamedTuple):
    """Consecutive steps of one size."""

    first_step: int
    end_step: float
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
    def constant(cls, size: int) -> "BatchSizes":
        """Every step has ``size`` samples."""
        return cls(schedule=((0, size),))

    @cached_property
    def largest(self) -> int:
        """Samples of the largest step."""
        return max(size for _, size in self.schedule)

    def phase_of(self, step: int) -> Phase:
        """The part of the schedule that a step is in."""
        return next(phase for phase in self._phases if step < phase.end_step)

    def size_of(self, step: int) -> int:
        """Samples of a step."""
        return self.phase_of(step).size

    def first_sample(self, step: int) -> int:
        """Samples consumed before a step; ``step`` may be the one after the last."""
        phase = self.phase_of(step)
        return phase.first_sample + (step - phase.first_step) * phase.size

    def sizes_from(self, step: int) -> tuple[int, ...]:
        """Sizes of that step and of all after it, each once, in order."""
        coming = (phase.size for phase in self._phases if step < phase.end_step)
        return tuple(dict.fromkeys(coming))

    def step_at(self, consumed_samples: int) -> int:
        """The step that begins after so many samples, or a :class:`StateError` if none does."""
        phase = [each for each in self._phases if each.first_sample <= consumed_samples][-1]
        steps, rest = divmod(consumed_samples - phase.first_sample, phase.size)
        if rest:
            what = (
                f"no multiple of --global-batch-size {phase.size}; resume with another global "
                "batch size"
            )
            if len(self.schedule) > 1:
                what = (
                    "after which no step of --step-batch-size-schedule begins; resume with the "
                    "schedule that it was trained with"
                )
            raise StateError(f"the checkpoint has consumed {consumed_samples} samples, {what}")
        return phase.first_step + steps

    def step_from(self, samples: int) -> int:
        """The first step that begins after so many samples or more."""
        phase = [each for each in self._phases if each.first_sample <= samples][-1]
        return phase.first_step - (phase.first_sample - samples) // phase.size

    @cached_property
    def _phases(self) -> tuple[Phase, ...]:
        """Every phase that has a step."""
        phases, step, consumed = [], 0, 0
        for (_, size), (threshold, _) in pairwise(self.schedule):
            # None where the step that reached an earlier threshold reached this one too.
            steps = max(0, -(-(threshold - consumed) // size))
            if steps:
                phases.append(Phase(step, step + steps, consumed, size))
            step, consumed = step + steps, consumed + steps * size
        return (*phases, Phase(step, math.inf, consumed, self.schedule[-1][1]))


class SampleLengths(Protocol):
    """An endless order of samples, and their lengths in tokens."""

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Sample numbers at the places ``first`` to ``first + size`` of the order."""

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""


@dataclass(eq=False)
class Scheduler:
    """Plans training or evaluation steps and learns from them.

    Attributes:
        job: how the largest step is cut up; a smaller one has fewer micro-batches.
        batch_sizes: samples of every step.
        worker: plans the following step while one runs; None plans every step when it begins.
        uncapped: whether a step that cannot keep the token cap runs above it, with a warning.
    """

    planner: StepPlanner
    job: Job
    index: SampleLengths
    batch_sizes: BatchSizes
    worker: Executor | None = None
    uncapped: bool = False
    _planned: dict[int, PlannedStep] = field(default_factory=dict, init=False)
    _ahead: dict[int, Future[PlannedStep]] = field(default_factory=dict, init=False)
    _followers: list[Callable[[PlannedStep], None]] = field(default_factory=list, init=False)
    _known_for_next: Knowledge | None = field(default=None, init=False)
    _finished_step: int = field(default=-1, init=False)

    def planned(self, step: int) -> PlannedStep:
        """The plan of a step."""
        if step not in self._planned:
            started = self.planner.clock()
            known, future = self.planner.knowledge(), self._ahead.pop(step, None)
            self._drop_plans_ahead()
            earlier = self._known_for_next or known
            planned = future.result() if future else self._plan(step, earlier)
            if self.worker is not None:
                self._known_for_next = known
            self._followers.clear()
            wait_ms = (self.planner.clock() - started) * 1e3
            self._planned[step] = replace(planned, wait_ms=wait_ms)
            for old in [known for known in self._planned if known <= step - _PLANS_KEPT]:
                del self._planned[old]
        return self._planned[step]

    def plan_following(self, step: int) -> None:
        """Let the worker start on the step after ``step``, which runs; once, and if there is one.

        Best called when the first micro-batch computes: a thread that plans and one that launches
        kernels compete, and before that the device has nothing to do. Where it is not called,
        :meth:`planned` plans when asked, and makes the same plan.
        """
        known, is_planned = self._known_for_next, step + 1 in self._ahead
        if self.worker is None or known is None or is_planned or step not in self._planned:
            return
        followers, self._followers = self._followers, []
        self._ahead = {step + 1: self.worker.submit(self._plan_for, step + 1, known, followers)}

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Call ``then`` with the next plan that the worker makes, on its thread; never without a
        worker, nor if planning fails, which :meth:`planned` will raise."""
        if self.worker is not None:
            self._followers.append(then)

    def _plan_for(
        self, step: int, known: Knowledge, followers: Sequence[Callable[[PlannedStep], None]]
    ) -> PlannedStep:
        planned = self._plan(step, known)
        for then in followers:
            then(planned)
        return planned

    def _drop_plans_ahead(self) -> None:
        """Forget plans of steps that do not come, once the worker is done with them."""
        for future in self._ahead.values():
            future.exception()
        self._ahead.clear()

    def _plan(self, step: int, known: Knowledge) -> PlannedStep:
        first, size = self.batch_sizes.first_sample(step), self.batch_sizes.size_of(step)
        samples, job = self.index.global_batch(first, size), self.job
        lengths_tokens = self.index.lengths_of(samples).tolist()
        if size < (largest := self.batch_sizes.largest):
            name = f"step {step}: --step-batch-size-schedule size"
            sizes = {"samples of a position": largest // job.micro_batches}
            job = replace(job, micro_batches=whole_parts(size, name, sizes))
        plan = partial(self.planner.plan, step, lengths_tokens, job, known)
        try:
            return plan(samples=samples)
        except PlanError as error:
            if not self.uncapped:
                raise
            warnings.warn(
                f"evaluation step {step}: {error}. It runs above the cap, in order of arrival",
                stacklevel=2,
            )
        settings = self.planner.plan_settings
        in_order = replace(
            settings,
            config=replace(settings.config, batching="arrival"),
            max_tokens_per_micro_batch=sum(lengths_tokens),
        )
        return plan(samples=samples, plan_settings=in_order)

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        """Learn from a step. Megatron may run a step again; a repeated call changes nothing."""
        if step > self._finished_step:
            self._finished_step = step
            self.planner.learn(self._planned[step], measured)

    def for_evaluation(
        self, index: SampleLengths, job: Job, global_batch_size: int, *, dense: bool
    ) -> "Scheduler":
        """A scheduler of evaluation: the same placement, cp_sizes and cap, no tuning.

        Budgets are the same in every step, so that losses are comparable: those that cover the
        longest sample where evaluation is ``dense``, else base budgets.
        """
        training = self.planner
        config = replace(
            training.plan_settings.config, tuning="off", max_segments=1, positions="fixed"
        )
        if dense:
            most = training.coverage.max_blocks
            config = replace(config, base_budget=most, layer_budgets=None)
        settings = replace(training.plan_settings, config=config)
        planner = replace(training, job=job, plan_settings=settings)
        sizes = BatchSizes.constant(global_batch_size)
        return Scheduler(planner, job=job, index=index, batch_sizes=sizes, uncapped=True)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; saved inside Megatron's ``args``."""
        return self.planner.state_dict() | {
            "consumed_samples": self.batch_sizes.first_sample(self._finished_step + 1),
            "next_plan": self._known_for_next and self._known_for_next.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over saved state; see :meth:`.StepPlanner.load_state_dict` and
        :meth:`BatchSizes.step_at`."""
        afresh = self.planner.load_state_dict(state)
        self._finished_step = self.batch_sizes.step_at(int(state["consumed_samples"])) - 1
        self._drop_plans_ahead()
        self._planned.clear()
        self._known_for_next = None
        if self.worker is not None and not afresh and state["next_plan"] is not None:
            self._known_for_next = self.planner.knowledge().restored(state["next_plan"])
        return afresh
