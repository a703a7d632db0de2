# SPDX-License-Identifier: Apache-2.0
"""The scheduler: from what is known after step t to the plan of step t + 1, alike on every rank.

A plan is a pure function of the sample lengths and of what was known when it was made (coverage
curves and cost corrections); knowledge changes only in :meth:`Scheduler.finish_step`, from
measurements that are identical on all ranks. Ahead of time, step t + 1 is planned while step t
runs, from what was known when t began: always that, however fast the planner, so that ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sparsebalance_megatron.config import Calibration as CalibrationChoice
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.batch_sizes import BatchSizes
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.learners import IDLE_LEARNERS, make_learners
from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_plan import JobShape, PlanError, PlanPolicy
from sparsebalance_megatron.plan.step_problem import PlanInputs
from sparsebalance_megatron.plan.step_samples import SampleLengths, StepSamples

_PLANS_KEPT = 2
"""The step that runs and the one after it."""

_STATE_VERSION = 4


class StateError(ValueError):
    """Saved scheduler state does not fit this run."""


Snapshots = Mapping[str, Any]
"""What every learner knew, by its name: all that a plan is made from besides lengths."""


class Scheduler:
    """Plans training steps and learns from them.

    Args:
        job: how steps are cut up; a step of fewer samples has fewer micro-batches than it says.
        index: the training samples and their lengths.
        global_batch_size: samples per step, or what they depend on. In the latter case the largest
            step is that of ``job``.
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
        global_batch_size: int | BatchSizes,
        calibrate: CalibrationChoice,
        clock: Callable[[], float],
        worker: Executor | None = None,
    ) -> None:
        sizes = (
            BatchSizes.constant(global_batch_size)
            if isinstance(global_batch_size, int)
            else global_batch_size
        )
        self.batch_sizes = sizes
        self._most_samples = max(size for _, size in sizes.schedule)
        self.job = job
        self.policy = policy
        self.coverage = coverage
        self._learners = make_learners(job, policy, coverage, global_batch_size=self._most_samples)
        self.calibration = self._learners["calibration"]
        self._idle_learners = IDLE_LEARNERS[calibrate]
        self._cost = cost
        self._samples = StepSamples(index=index, batch_sizes=sizes)
        self._clock = clock
        self._worker = worker
        self._planned: dict[int, PlannedStep] = {}
        self._ahead: dict[int, Future[PlannedStep]] = {}
        self._followers: list[Callable[[PlannedStep], None]] = []
        self._known_for_next: Snapshots | None = None
        self._finished_step = -1

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
        known = self._known_for_next
        if self._worker is None or known is None or step + 1 in self._ahead:
            return
        if step not in self._planned:
            return
        future = self._worker.submit(self._plan, step + 1, known)
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
        known = {name: learner.snapshot() for name, learner in self._learners.items()}
        if self._worker is None:
            return self._plan(step, known)
        future = self._ahead.pop(step, None)
        self._wait_for_worker()
        if future is None:
            planned = self._plan(step, self._known_for_next or known)
        else:
            planned = future.result()
        self._known_for_next = known
        self._followers.clear()
        return planned

    def _wait_for_worker(self) -> None:
        """Let go of what was planned for a step that does not come: after going back, say."""
        for future in self._ahead.values():
            future.exception()
        self._ahead.clear()

    def _plan(self, step: int, known: Snapshots) -> PlannedStep:
        started = self._clock()
        samples = self._samples.of_step(step)
        inputs = PlanInputs(
            lengths_tokens=self._samples.lengths_tokens(samples),
            job=self._job_of(step),
            policy=self.policy,
            cost=self._cost,
            scales=replace(known["calibration"], slowness_RP=known["device_speed"]),
            coverage=known["coverage"],
            owed_coverage=known["coverage_balance"],
            later_lengths_tokens=self._samples.later_lengths_tokens(step),
        )
        return PlannedStep(
            plan=plan_step(step, inputs),
            samples=samples,
            scales=inputs.scales,
            plan_ms=(self._clock() - started) * 1e3,
            wait_ms=0.0,
        )

    def _job_of(self, step: int) -> JobShape:
        """The job with as many micro-batches as the step has samples for."""
        size, most = self.batch_sizes.size_of(step), self._most_samples
        if size == most:
            return self.job
        micro_batches, rest = divmod(self.job.micro_batches * size, most)
        if rest or not micro_batches:
            raise PlanError(
                f"step {step} has {size} samples, which do not fill the same slots on all ranks; "
                "every batch size of --step-batch-size-schedule must be a multiple of "
                f"{most // self.job.micro_batches}"
            )
        return replace(self.job, micro_batches=micro_batches)

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        """Learn from a step. Megatron may run a step again; a repeated call changes nothing."""
        if step <= self._finished_step:
            return
        self._finished_step = step
        for name, learner in self._learners.items():
            if name not in self._idle_learners:
                learner.update(self._planned[step], measured)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; saved inside Megatron's ``args``."""
        following = self._finished_step + 1
        learnt = {name: learner.state_dict() for name, learner in self._learners.items()}
        return {
            "version": _STATE_VERSION,
            "consumed_samples": self.batch_sizes.first_sample(following),
            **{name: state for name, state in learnt.items() if state is not None},
            "next_plan": self._known_for_next and _saved(self._known_for_next),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over saved state, of a run that may have been laid out otherwise.

        Nothing in it depends on the number of data-parallel or tensor-parallel ranks.

        Returns:
            What does not fit this run and starts afresh, one sentence each.

        Raises:
            StateError: if it was written by another version, or no step begins there.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(
                f"the plugin's state in the checkpoint has version {state.get('version')}, not "
                f"{_STATE_VERSION}; resume with the release that wrote it, or with --finetune"
            )
        following = self.batch_sizes.step_at(int(state["consumed_samples"]))
        if following is None:
            raise StateError(
                f"the checkpoint has consumed {state['consumed_samples']} samples, after which no "
                "step begins; resume with another global batch size"
            )
        self._finished_step = following - 1
        self._wait_for_worker()
        self._planned.clear()
        afresh = []
        for name, learner in self._learners.items():
            if learner.state_dict() is None:
                continue
            try:
                learner.load_state_dict(state[name])
            except ValueError as error:
                afresh.append(f"{name} starts afresh: {error}")
        self._known_for_next = None
        if self._worker is not None and not afresh and state["next_plan"] is not None:
            self._known_for_next = self._restored(state["next_plan"])
        return tuple(afresh)

    def _restored(self, state: dict[str, Any]) -> Snapshots:
        coverage = self.coverage.snapshot()
        coverage.load_state_dict(state["coverage"])
        return {
            "coverage_balance": float(state["owed_coverage"]),
            "coverage": coverage,
            "calibration": StageScales.of(np.array(state["scales_2PV"])),
            "device_speed": None,
        }


def _saved(known: Snapshots) -> dict[str, Any]:
    """Plain Python types. The devices' speed is left out: they may be others after a restart."""
    return {
        "owed_coverage": known["coverage_balance"],
        "coverage": known["coverage"].state_dict(),
        "scales_2PV": known["calibration"].scales_2PV.tolist(),
    }


def _pass_on(made: Future[PlannedStep], *, then: Callable[[PlannedStep], None]) -> None:
    if made.exception() is None:
        then(made.result())
