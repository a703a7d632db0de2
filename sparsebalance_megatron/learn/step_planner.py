# SPDX-License-Identifier: Apache-2.0
"""Plans steps from lengths and from what earlier steps have taught.

A plan is a pure function of the arguments of :meth:`StepPlanner.plan`, and measurements that
:meth:`StepPlanner.learn` is given are identical on all ranks. So ranks make the same plans.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.layer_budgets import ALL_DENSE
from sparsebalance_megatron.learn.calibration import Calibration, DeviceSlowness
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_problem import PlanInputs

_STATE_VERSION = 6
STATE_VERSION_IN_WINDOW = 7
"""Version of a state in the middle of a window of samples, which releases without windows would
train twice."""


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
            "cut_ratio": self.scales.cut_ratio,
        }

    def restored(self, state: Mapping[str, Any]) -> "Knowledge":
        """Saved knowledge of the job that this is about."""
        coverage = copy.deepcopy(self.coverage)
        coverage.load_state_dict(state["coverage"])
        # Earlier releases learnt no ratio.
        cut_ratio = state.get("cut_ratio", 1.0)
        scales = StageScales.of(np.array(state["scales_2PV"]), cut_ratio=cut_ratio)
        return Knowledge(coverage=coverage, scales=scales)


def kept_dense_length(
    state: Mapping[str, Any], settings: PlanSettings, cost: CostModel
) -> int | None:
    """The length of a saved state up to which documents are dense; None where it has none, was
    saved with another selection or other base budgets, to which that length says nothing, or
    follows from counted operations and these costs were measured."""
    if state.get("dense_up_to_counted") and cost.efficiency is None:
        return None
    config = settings.config
    now = _budgets_of(config), config.selection
    was = state.get("dense_up_to_of", now[0]), state.get("selection", now[1]).partition(",")[0]
    return state.get("dense_up_to_tokens") if was == now else None


def _budgets_of(config: SparseBalanceConfig) -> str:
    if config.layer_budgets == ALL_DENSE:
        return ALL_DENSE
    return f"{config.base_budget} blocks of {config.block_size}"


@dataclass(kw_only=True, eq=False)
class StepPlanner:
    """Plans steps, and learns from how they went.

    ``job``: how steps are cut up; plans may be of other numbers of micro-batches.
    ``dense_counted``: the length up to which documents are dense follows from counted operations.
    ``clock``: seconds, for the time that planning takes.
    """

    job: Job
    plan_settings: PlanSettings
    cost: CostModel
    coverage: CoverageCurves
    dense_counted: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._calibration = Calibration(self.job.pipeline_stages, self.job.virtual_stages)
        self._device_speed = DeviceSlowness(self.job.data_parallel_size, self.job.pipeline_stages)
        self._dense_L = self.plan_settings.dense_L(self.job.layers)

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
        placement: Placement | Arrangement | None = None,
        pinned_LS: np.ndarray | None = None,
        plan_settings: PlanSettings | None = None,
    ) -> PlannedStep:
        """Plan one step, or raise a :class:`PlanError` that names what does not fit.

        Args:
            step: named in messages, and part of the plan's digest.
            lengths_tokens: of the step's samples, in order of arrival.
            samples: their training samples; None numbers them from 0.
            placement, pinned_LS: see :class:`.PlanInputs`.
            plan_settings: of this step; None is that of the run.
        """
        started = self.clock()
        inputs = PlanInputs(
            lengths_tokens=tuple(lengths_tokens),
            job=job,
            plan_settings=plan_settings or self.plan_settings,
            cost=self.cost,
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
        calibrate = self.plan_settings.config.calibration
        if calibrate != "off":
            self._calibration.update(planned, measured)
        if calibrate == "measured":
            self._device_speed.update(planned, measured)

    def state_dict(self) -> dict[str, Any]:
        """State that later plans depend on besides lengths, in plain Python types; without device
        speeds, since a restart may run on other devices."""
        config = self.plan_settings.config
        return {
            "version": _STATE_VERSION,
            "selection": config.selection_rule,
            "dense_up_to_tokens": config.dense_up_to_tokens,
            "dense_up_to_of": _budgets_of(config),
            "dense_up_to_counted": self.dense_counted,
            "coverage": self.coverage.state_dict(),
            "calibration": self._calibration.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Take over saved state, of a job with any number of data-parallel or tensor-parallel
        ranks; what does not fit this one and starts afresh, one sentence each. Raises a
        :class:`StateError` at another version's."""
        if state.get("version") not in (_STATE_VERSION, STATE_VERSION_IN_WINDOW):
            raise StateError(
                f"the plugin's state in the checkpoint has version {state.get('version')}, not "
                f"{_STATE_VERSION}; resume with the release that wrote it, or with --finetune"
            )
        afresh = []
        selection = self.plan_settings.config.selection_rule
        measured_with = state.get("selection", selection)
        for name, learner in (("coverage", self.coverage), ("calibration", self._calibration)):
            if name == "coverage" and measured_with != selection:
                afresh.append(f"{name} starts afresh: selection {measured_with} measured it")
                continue
            try:
                learner.load_state_dict(state[name])
            except ValueError as error:
                afresh.append(f"{name} starts afresh: {error}")
        return tuple(afresh)
