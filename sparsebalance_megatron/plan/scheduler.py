# SPDX-License-Identifier: Apache-2.0
"""The scheduler: from what is known after step t to the plan of step t + 1, alike on every rank.

A plan is a pure function of the sample lengths and of what was known when it was made (coverage
curves and cost corrections); knowledge changes only in :meth:`Scheduler.finish_step`, from
measurements that are identical on all ranks. Ahead of time, step t + 1 is planned while step t
runs, from what was known when t began: always that, however fast the planner, so that ranks agree.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from sparsebalance_megatron.config import Calibration as CalibrationChoice
from sparsebalance_megatron.cost.device_speed import DeviceSlowness
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_calibration import Calibration, StageScales
from sparsebalance_megatron.plan.budgets.price import horizon_steps
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.coverage_ledger import CoverageAccount
from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.placement.window import assign_window
from sparsebalance_megatron.plan.planner import evaluation_plan, plan_step
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy, StepPlan

_PLANS_KEPT = 2
"""The step that runs and the one after it."""

_STATE_VERSION = 3


class SampleLengths(Protocol):
    """An endless order of training samples, and their lengths in tokens."""

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Sample numbers at the places ``first`` to ``first + size`` of the order."""

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""


class StateError(ValueError):
    """Saved scheduler state does not fit this run."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan together with the samples it places.

    ``samples[i]`` is the training sample that the plan calls ``i``; ``scales`` are the cost
    corrections that its expectation contains. ``plan_ms`` is how long planning took on this rank,
    ``wait_ms`` how long the step waited for it.
    """

    plan: StepPlan
    samples: np.ndarray
    scales: StageScales
    plan_ms: float
    wait_ms: float


@dataclass(frozen=True, kw_only=True)
class _Knowledge:
    """What a plan is made from besides lengths; later learning does not change it."""

    coverage: CoverageCurves
    scales: StageScales
    owed_coverage: float

    def state_dict(self) -> dict[str, Any]:
        return {
            "owed_coverage": self.owed_coverage,
            "coverage": self.coverage.state_dict(),
            "scales_2PV": np.stack([self.scales.forward_PV, self.scales.backward_PV]).tolist(),
        }


class Scheduler:
    """Plans training steps and learns from them.

    Args:
        index: the training samples and their lengths.
        global_batch_size: samples per step.
        window: consecutive global batches that may exchange samples.
        calibrate: which predicted times measured ones correct.
        clock: seconds, for the time planning takes.
        worker: plans the following step while one runs; None plans every step when it begins.
    """

    def __init__(
        self,
        *,
        job: JobShape,
        policy: PlanPolicy,
        cost: CostModel,
        coverage: CoverageCurves,
        index: SampleLengths,
        global_batch_size: int,
        window: int,
        calibrate: CalibrationChoice,
        clock: Callable[[], float],
        worker: Executor | None = None,
    ) -> None:
        self.job = job
        self.policy = policy
        self.coverage = coverage
        self.calibration = Calibration(job.pipeline_stages, job.virtual_stages)
        self._slowness = DeviceSlowness(job.data_parallel_size, job.pipeline_stages)
        self._learners = _learners(calibrate, self.calibration, self._slowness)
        self._cost = cost
        self._index = index
        self._global_batch_size = global_batch_size
        self._window = window
        self._clock = clock
        self._worker = worker
        self._planned: dict[int, PlannedStep] = {}
        self._ahead: dict[int, Future[PlannedStep]] = {}
        self._followers: list[Callable[[PlannedStep], None]] = []
        self._next_knowledge: _Knowledge | None = None
        self._finished_step = -1
        self._account = CoverageAccount(global_batch_size)
        self._dealt: dict[int, tuple[np.ndarray, ...]] = {}

    def planned(self, step: int) -> PlannedStep:
        """The plan of a step."""
        if step not in self._planned:
            started = self._clock()
            planned = self._plan_ahead(step)
            self._planned[step] = replace(planned, wait_ms=(self._clock() - started) * 1e3)
            for old in [known for known in self._planned if known <= step - _PLANS_KEPT]:
                del self._planned[old]
        return self._planned[step]

    def plan_following(self, step: int) -> None:
        """Let the worker start on the step after ``step``, which runs; once, and if there is one.

        Best called when the first micro-batch computes: a thread that plans and one that launches
        kernels take turns, and before that the device has nothing to do. Where it is not called,
        :meth:`planned` plans when asked, and makes the same plan.
        """
        if self._worker is None or step + 1 in self._ahead or step not in self._planned:
            return
        future = self._worker.submit(self._plan, step + 1, self._next_knowledge)
        self._ahead = {step + 1: future}
        for then in self._followers:
            future.add_done_callback(partial(_pass_on, then=then))
        self._followers.clear()

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Call ``then`` with the next plan that the worker makes, on its thread.

        Never without a worker, nor if planning fails, which :meth:`planned` will raise.
        """
        if self._worker is not None:
            self._followers.append(then)

    def _plan_ahead(self, step: int) -> PlannedStep:
        known = _Knowledge(
            coverage=copy.deepcopy(self.coverage),
            scales=replace(self.calibration.scales(), slowness_DP=self._slowness.factors_DP()),
            owed_coverage=self._account.owed_coverage,
        )
        if self._worker is None:
            return self._plan(step, known)
        future = self._ahead.pop(step, None)
        self._wait_for_worker()
        if future is None:
            planned = self._plan(step, self._next_knowledge or known)
        else:
            planned = future.result()
        self._next_knowledge = known
        self._followers.clear()
        return planned

    def _wait_for_worker(self) -> None:
        """Let go of what was planned for a step that does not come: after going back, say."""
        for future in self._ahead.values():
            future.exception()
        self._ahead.clear()

    def _plan(self, step: int, known: _Knowledge) -> PlannedStep:
        started = self._clock()
        samples = self._samples(step)
        plan = plan_step(
            step=step,
            lengths_tokens=tuple(int(n) for n in self._index.lengths_of(samples)),
            job=self.job,
            policy=self.policy,
            cost=self._cost,
            scales=known.scales,
            coverage=known.coverage,
            owed_coverage=known.owed_coverage,
            later_lengths_tokens=self._later_lengths_tokens(step),
        )
        return PlannedStep(
            plan=plan,
            samples=samples,
            scales=known.scales,
            plan_ms=(self._clock() - started) * 1e3,
            wait_ms=0.0,
        )

    def _later_lengths_tokens(self, step: int) -> tuple[int, ...]:
        """Of the horizon's later steps, in order of arrival: a window changes little in the sum."""
        size = self._global_batch_size
        later_steps = horizon_steps(size) - 1
        if later_steps == 0:
            return ()
        later = self._index.global_batch((step + 1) * size, later_steps * size)
        return tuple(self._index.lengths_of(later).tolist())

    def _samples(self, step: int) -> np.ndarray:
        """Training samples of a step, in order of arrival.

        With a window the samples of ``window`` consecutive global batches are dealt out anew by
        predicted cost. That uses the cost model as loaded, never corrected, so that a resumed run
        deals the same way without any saved state.
        """
        size = self._global_batch_size
        if self._window == 1:
            return self._index.global_batch(step * size, size)
        return self._dealt_window(step - step % self._window)[step % self._window]

    def _dealt_window(self, first: int) -> tuple[np.ndarray, ...]:
        """The global batches of the window that begins with step ``first``; kept until the next."""
        dealt = self._dealt.get(first)
        if dealt is None:
            size = self._global_batch_size
            samples = self._index.global_batch(first * size, size * self._window)
            batches = assign_window(
                self._base_sample_ms(samples),
                self._window,
                size,
                data_parallel_size=self.job.data_parallel_size,
            )
            dealt = tuple(samples[list(batch)] for batch in batches)
            before = first - self._window
            kept = {before: self._dealt[before]} if before in self._dealt else {}
            self._dealt = kept | {first: dealt}
        return dealt

    def _open_window(self, step: int) -> str | None:
        """Digest of what is left of the window that ``step`` continues; None where one begins."""
        if step % self._window == 0:
            return None
        left = self._dealt_window(step - step % self._window)[step % self._window :]
        return hashlib.sha256(np.concatenate(left).astype("<i8").tobytes()).hexdigest()

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
        totals = measured.coverage
        if totals.count:
            self._account.settle(
                base_mean=totals.base_sum / totals.count,
                executed_mean=totals.executed_sum / totals.count,
            )
        planned = self._planned[step]
        expectation = planned.plan.expectation
        for learner in self._learners:
            learner.update(
                predicted_forward_DPVM=expectation.forward_ms,
                measured_forward_DPVM=measured.forward_ms,
                predicted_backward_DPVM=expectation.backward_ms,
                measured_backward_DPVM=measured.backward_ms,
                predicted_with=planned.scales,
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; saved inside Megatron's ``args``."""
        following = self._finished_step + 1
        return {
            "version": _STATE_VERSION,
            "consumed_samples": following * self._global_batch_size,
            "open_window": self._open_window(following),
            "coverage_balance": self._account.balance,
            "coverage": self.coverage.state_dict(),
            "calibration": self.calibration.state_dict(),
            "next_plan": self._next_knowledge.state_dict() if self._next_knowledge else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over saved state, of a run that may have been laid out otherwise.

        Nothing in it depends on the number of data-parallel or tensor-parallel ranks.

        Returns:
            What does not fit this run and starts afresh, one sentence each.

        Raises:
            StateError: if it was written by another version, or stops inside a window that this
                run deals out otherwise.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(
                f"the plugin's state in the checkpoint has version {state.get('version')}, not "
                f"{_STATE_VERSION}; resume with the release that wrote it, or with --finetune"
            )
        following = int(state["consumed_samples"]) // self._global_batch_size
        if state["open_window"] != self._open_window(following):
            raise StateError(
                "the checkpoint stops between steps that exchange samples, and this run would deal "
                "them out otherwise; resume with the same --sparse-balance-window, "
                "--global-batch-size, cost table and data-parallel size, or from a checkpoint at a "
                "multiple of the window"
            )
        self._finished_step = following - 1
        self._account.balance = float(state["coverage_balance"])
        self._wait_for_worker()
        self._planned.clear()
        afresh = []
        parts = {"coverage": self.coverage, "calibration": self.calibration}
        for name, part in parts.items():
            try:
                part.load_state_dict(state[name])
            except ValueError as error:
                afresh.append(f"{name} starts afresh: {error}")
        self._next_knowledge = None
        if self._worker is not None and not afresh:
            self._next_knowledge = self._knowledge_of(state["next_plan"])
        return tuple(afresh)

    def _knowledge_of(self, state: dict[str, Any] | None) -> _Knowledge | None:
        if state is None:
            return None
        coverage = copy.deepcopy(self.coverage)
        coverage.load_state_dict(state["coverage"])
        return _Knowledge(
            coverage=coverage,
            scales=StageScales.of(np.array(state["scales_2PV"])),
            owed_coverage=float(state["owed_coverage"]),
        )


def _learners(
    choice: CalibrationChoice, calibration: Calibration, slowness: DeviceSlowness
) -> tuple[Calibration | DeviceSlowness, ...]:
    match choice:
        case "off":
            return ()
        case "stages":
            return (calibration,)
        case "measured":
            return (calibration, slowness)


def _pass_on(made: Future[PlannedStep], *, then: Callable[[PlannedStep], None]) -> None:
    if made.exception() is None:
        then(made.result())


class EvaluationSchedule:
    """Plans of evaluation steps: order of arrival, never tuned.

    Args:
        dense: budgets cover all blocks of the longest sample, instead of the base budgets.
    """

    def __init__(
        self,
        *,
        job: JobShape,
        policy: PlanPolicy,
        cost: CostModel,
        coverage: CoverageCurves,
        index: SampleLengths,
        global_batch_size: int,
        dense: bool,
    ) -> None:
        self.job = job
        self._policy = replace(policy, base_budget=coverage.max_blocks) if dense else policy
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
        return PlannedStep(
            plan=plan,
            samples=samples,
            scales=StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages),
            plan_ms=0.0,
            wait_ms=0.0,
        )

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Nothing is planned ahead."""
