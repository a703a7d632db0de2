# SPDX-License-Identifier: Apache-2.0
"""Plans steps from lengths and from what earlier steps have taught.

A plan is a pure function of the arguments of :meth:`StepPlanner.plan`, and knowledge changes only
in :meth:`StepPlanner.learn`, from measurements that are identical on all ranks. So ranks that make
the same calls make the same plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import DEFAULT_SELECTION
from sparsebalance_megatron.config import Calibration as CalibrationChoice
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.calibration import Calibration, DeviceSlowness
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_problem import PlanInputs

_STATE_VERSION = 6


class StateError(ValueError):
    """Saved planner state does not fit this run."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Snapshot of everything that plans depend on besides lengths."""

    coverage: CoverageCurves
    scales: StageScales

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types. Device speeds are left out: a restart may run on other devices."""
        return {
            "coverage": self.coverage.state_dict(),
            "scales_2PV": self.scales.scales_2PV.tolist(),
        }

    def restored(self, state: Mapping[str, Any]) -> Knowledge:
        """Saved knowledge of the job that this is about."""
        coverage = copy.deepcopy(self.coverage)
        coverage.load_state_dict(state["coverage"])
        return Knowledge(
            coverage=coverage,
            scales=StageScales.of(np.array(state["scales_2PV"])),
        )


class StepPlanner:
    """Plans steps, and learns from how they went.

    Args:
        job: how steps are cut up; plans may be of other numbers of micro-batches.
        coverage: the curves that learn.
        calibrate: which predicted times measured ones correct.
        selection: that coverage is measured with.
        clock: seconds, for the time that planning takes.
    """

    def __init__(
        self,
        *,
        job: Job,
        plan_settings: PlanSettings,
        cost: CostModel,
        coverage: CoverageCurves,
        calibrate: CalibrationChoice,
        clock: Callable[[], float],
        selection: str = DEFAULT_SELECTION,
    ) -> None:
        self.plan_settings = plan_settings
        self.coverage = coverage
        self.clock = clock
        self._cost = cost
        self._selection = selection
        self._calibration = Calibration(job.pipeline_stages, job.virtual_stages)
        self._device_speed = DeviceSlowness(job.data_parallel_size, job.pipeline_stages)
        self._calibrate = calibrate
        self._dense_L = plan_settings.dense_L(job.layers)

    def knowledge(self) -> Knowledge:
        """Snapshot of what has been learnt; later steps do not change it."""
        return Knowledge(
            coverage=copy.deepcopy(self.coverage),
            scales=replace(self._calibration.snapshot(), slowness_RP=self._device_speed.snapshot()),
        )

    def plan(
        self,
        step: int,
        lengths_tokens: Sequence[int],
        job: Job,
        known: Knowledge,
        *,
        samples: np.ndarray | None = None,
        placement: Placement | None = None,
        pinned_LS: np.ndarray | None = None,
        plan_settings: PlanSettings | None = None,
    ) -> PlannedStep:
        """Plan one step.

        Args:
            step: named in messages, and part of the plan's digest.
            lengths_tokens: of the step's samples, in order of arrival.
            samples: their training samples; None numbers them from 0.
            placement, pinned_LS: see :class:`.PlanInputs`.
            plan_settings: of this step; None is that of the run.

        Raises:
            PlanError: no plan exists, naming the sample or the number that does not fit.
        """
        started = self.clock()
        inputs = PlanInputs(
            lengths_tokens=tuple(lengths_tokens),
            job=job,
            plan_settings=plan_settings or self.plan_settings,
            cost=self._cost,
            scales=known.scales,
            coverage=known.coverage,
            placement=placement,
            pinned_LS=pinned_LS,
        )
        return PlannedStep(
            plan=plan_step(step, inputs),
            samples=np.arange(len(lengths_tokens)) if samples is None else samples,
            scales=known.scales,
            plan_ms=(self.clock() - started) * 1e3,
        )

    def learn(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from a step that this planner planned, or another that knew the same."""
        # Dense layers rank no blocks, so that they have no curves.
        counts_LU = np.where(self._dense_L[:, None], 0, measured.coverage.counts_LU)
        self.coverage.observe(measured.coverage.sums_LUK, counts_LU)
        if self._calibrate != "off":
            self._calibration.update(planned, measured)
        if self._calibrate == "measured":
            self._device_speed.update(planned, measured)

    @property
    def _saved(self) -> dict[str, Any]:
        """State for a checkpoint; no device speeds, because a restart may run on other devices."""
        return {"coverage": self.coverage, "calibration": self._calibration}

    def state_dict(self) -> dict[str, Any]:
        """State that later plans depend on besides lengths, in plain Python types."""
        saved = {name: learner.state_dict() for name, learner in self._saved.items()}
        return {
            "version": _STATE_VERSION,
            "selection": self._selection,
            "dense_up_to_tokens": self.plan_settings.dense_up_to_tokens,
            **saved,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Take over saved state, of a job that may have been laid out otherwise.

        Nothing in it depends on the number of data-parallel or tensor-parallel ranks.

        Returns:
            What does not fit this job and starts afresh, one sentence each.

        Raises:
            StateError: if it was written by another version.
        """
        check_version(state)
        afresh = []
        if "coverage_balance" in state:
            afresh.append("the account of coverage goes: budgets only rise above base budgets")
        measured_with = state.get("selection", self._selection)
        for name, learner in self._saved.items():
            if name == "coverage" and measured_with != self._selection:
                afresh.append(f"{name} starts afresh: selection {measured_with} measured it")
                continue
            try:
                learner.load_state_dict(state[name])
            except ValueError as error:
                afresh.append(f"{name} starts afresh: {error}")
        return tuple(afresh)


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse state that another version of the plugin wrote.

    Raises:
        StateError: naming both versions.
    """
    if state.get("version") != _STATE_VERSION:
        raise StateError(
            f"the plugin's state in the checkpoint has version {state.get('version')}, not "
            f"{_STATE_VERSION}; resume with the release that wrote it, or with --finetune"
        )
