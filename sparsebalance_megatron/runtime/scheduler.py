# SPDX-License-Identifier: Apache-2.0
"""The scheduler: from what is known after step t to the plan of step t + 1, alike on every rank.

A plan is a pure function of the sample lengths and of the scheduler's state (coverage curves and
cost corrections); the state changes only in :meth:`Scheduler.finish_step`, from measurements that
are identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.cost.calibrate import Calibration, StageScales
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.latency import step_costs
from sparsebalance_megatron.plan.planner import evaluation_plan, plan_step
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy, StepPlan
from sparsebalance_megatron.plan.window import assign_window
from sparsebalance_megatron.runtime.telemetry import StepMeasurement

_PLANS_KEPT = 2
"""The step that runs and the one after it."""


class StateError(ValueError):
    """Saved scheduler state does not fit this run."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan together with the samples it places.

    ``samples[i]`` is the training sample that the plan calls ``i``; ``plan_ms`` is how long
    planning took on this rank.
    """

    plan: StepPlan
    samples: np.ndarray
    plan_ms: float


class Scheduler:
    """Plans training steps and learns from them.

    Args:
        index: the training samples and their lengths.
        global_batch_size: samples per step.
        window: consecutive global batches that may exchange samples.
        calibrate: whether measured times correct predicted ones.
        clock: seconds, for the time planning takes.
    """

    def __init__(
        self,
        *,
        job: JobShape,
        policy: PlanPolicy,
        cost: CostModel,
        coverage: CoverageCurves,
        index: SampleIndex,
        global_batch_size: int,
        window: int,
        calibrate: bool,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.policy = policy
        self.coverage = coverage
        self.calibration = Calibration(job.pipeline_stages, job.virtual_stages)
        self._cost = cost
        self._index = index
        self._global_batch_size = global_batch_size
        self._window = window
        self._calibrate = calibrate
        self._clock = clock
        self._planned: dict[int, PlannedStep] = {}
        self._finished_step = -1

    def planned(self, step: int) -> PlannedStep:
        """The plan of a step; made on first use, from the state of that moment."""
        if step not in self._planned:
            started = self._clock()
            samples = self._samples(step)
            plan = plan_step(
                step=step,
                lengths_tokens=tuple(int(n) for n in self._index.lengths_of(samples)),
                job=self.job,
                policy=self.policy,
                cost=self._cost,
                scales=self.calibration.scales(),
                coverage=self.coverage,
            )
            self._planned[step] = PlannedStep(
                plan=plan, samples=samples, plan_ms=(self._clock() - started) * 1e3
            )
            for old in [known for known in self._planned if known <= step - _PLANS_KEPT]:
                del self._planned[old]
        return self._planned[step]

    def _samples(self, step: int) -> np.ndarray:
        """Training samples of a step, in order of arrival.

        With a window the samples of ``window`` consecutive global batches are dealt out anew by
        predicted cost. That uses the cost model as loaded, never corrected, so that a resumed run
        deals the same way without any saved state.
        """
        size = self._global_batch_size
        if self._window == 1:
            return self._index.global_batch(step * size, size)
        first = step - step % self._window
        samples = self._index.global_batch(first * size, size * self._window)
        batches = assign_window(
            self._base_sample_ms(samples),
            self._window,
            size,
            data_parallel_size=self.job.data_parallel_size,
        )
        return samples[list(batches[step - first])]

    def _base_sample_ms(self, samples: np.ndarray) -> np.ndarray:
        """Uncorrected ms of every sample at base budgets, over all stages."""
        uncorrected = StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages)
        costs = step_costs(self._index.lengths_of(samples), self.job, self._cost, uncorrected)
        budgets_LS = np.full((self.job.layers, len(samples)), self.policy.base_budget)
        forward_SC, backward_SC = costs.sample_ms(budgets_LS)
        return (forward_SC + backward_SC).sum(axis=1)

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        """Learn from a step. Megatron may run a step again; a repeated call changes nothing."""
        if step <= self._finished_step:
            return
        self._finished_step = step
        self.coverage.update(measured.coverage.sums_LUK, measured.coverage.counts_LU)
        if self._calibrate:
            expectation = self._planned[step].plan.expectation
            self.calibration.update(
                predicted_forward_DPVM=expectation.forward_ms,
                measured_forward_DPVM=measured.forward_ms,
                predicted_backward_DPVM=expectation.backward_ms,
                measured_backward_DPVM=measured.backward_ms,
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; saved inside Megatron's ``args``."""
        return {
            "version": 1,
            "finished_step": self._finished_step,
            "coverage": self.coverage.state_dict(),
            "calibration": self.calibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved state.

        Raises:
            StateError: if it was written by another version or for another model or pipeline.
        """
        if state.get("version") != 1:
            raise StateError(f"scheduler state has version {state.get('version')}, expected 1")
        try:
            self.coverage.load_state_dict(state["coverage"])
            self.calibration.load_state_dict(state["calibration"])
        except (KeyError, ValueError) as error:
            raise StateError(f"scheduler state of the checkpoint does not fit: {error}") from error
        self._finished_step = int(state["finished_step"])
        self._planned.clear()


class EvaluationSchedule:
    """Plans of evaluation steps: order of arrival, base budgets, never tuned."""

    def __init__(
        self,
        *,
        job: JobShape,
        policy: PlanPolicy,
        cost: CostModel,
        coverage: CoverageCurves,
        index: SampleIndex,
        global_batch_size: int,
    ) -> None:
        self.job = job
        self._policy = policy
        self._cost = cost
        self._coverage = coverage
        self._index = index
        self._global_batch_size = global_batch_size

    def planned(self, step: int) -> PlannedStep:
        """The plan of evaluation step ``step``."""
        size = self._global_batch_size
        samples = self._index.global_batch(step * size, size)
        plan = evaluation_plan(
            step=step,
            lengths_tokens=tuple(int(n) for n in self._index.lengths_of(samples)),
            job=self.job,
            policy=self._policy,
            cost=self._cost,
            scales=StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages),
            coverage=self._coverage,
        )
        return PlannedStep(plan=plan, samples=samples, plan_ms=0.0)
