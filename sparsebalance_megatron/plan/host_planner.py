# SPDX-License-Identifier: Apache-2.0
"""Plans steps whose samples a host hands over, and learns from what it measured of them.

Shape legend: L layers, S samples of a step, R data-parallel ranks, P pipeline stages, V virtual
stages, M micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.host_job import HostJob
from sparsebalance_megatron.plan.learners import IDLE_LEARNERS, make_learners
from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.placement.balance import Placement
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.scheduler import StateError
from sparsebalance_megatron.plan.step_plan import PlanError, PlanPolicy
from sparsebalance_megatron.plan.step_problem import PlanInputs

_STATE_VERSION = 1


class HostPlanner:
    """Plans from lengths alone; knows no data, no loop and no device.

    A plan is a pure function of the arguments of :meth:`plan` and of what has been learnt, so every
    process that made the same calls makes the same plan. Knowledge changes in :meth:`learn` and
    :meth:`load_state_dict` only.

    Args:
        config: what the user chose.
        job: of the host; without context parallelism.
        cost: of the job, recomputation included; None is :meth:`.HostJob.cost_model`.
        clock: seconds, for the time that planning takes.

    Attributes:
        steps: learnt from; a plan that is told no other number is of this step.

    Raises:
        ConfigError, CostTableError: naming the field or file and the remedy.
    """

    def __init__(
        self,
        config: SparseBalanceConfig,
        job: HostJob,
        *,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        cap_tokens = config.max_tokens_per_micro_batch or job.padded(job.max_sample_tokens)
        for name, without in (("max_context_parallel", 1), ("dry_run", None)):
            if getattr(config, name) not in (None, without):
                raise ConfigError(
                    f"{flag_name(name)} {getattr(config, name)}: not where a host owns data and "
                    "loop; drop it"
                )
        self.job = job
        self.policy = PlanPolicy.from_config(config, cap_tokens)
        self.cost = job.cost_model(config) if cost is None else cost
        layout = job.layout(1)
        self.coverage = CoverageCurves(
            layout.layers,
            -(-job.padded(job.max_sample_tokens) // config.block_size),
            config.coverage_decay,
        )
        self._learners = make_learners(
            layout,
            self.policy,
            self.coverage,
            global_batch_size=job.global_batch_size,
            # What a step owes is asked of the next one: nobody knows those after it.
            horizon_steps=1,
        )
        self._idle_learners = IDLE_LEARNERS[config.calibration]
        self._clock = clock
        self.steps = 0

    def plan(
        self,
        lengths_tokens: Sequence[int],
        *,
        micro_batches: int | None = None,
        placement: Placement | None = None,
        pinned_LS: np.ndarray | None = None,
        later_lengths_tokens: Sequence[int] = (),
        step: int | None = None,
    ) -> PlannedStep:
        """Plan one step.

        Args:
            lengths_tokens: of its samples; the plan calls them 0 to S - 1.
            micro_batches: of every rank; None is the least number that the token cap allows.
            placement: where the host has placed the samples, [rank][position] -> samples; the plan
                then only chooses budgets, and holds the host to no token cap.
            pinned_LS: budgets that samples keep, such as ``StepPlan.budgets_LS`` of a plan that
                they were in before; a column of zeros leaves a sample's to the plan. Pinned budgets
                are executed as they are, without a guard.
            later_lengths_tokens: of the samples after these, where the host knows them: coverage is
                then bought where it costs least among all of them.
            step: named in messages; None is :attr:`steps`.

        Raises:
            PlanError: no plan exists, naming the sample or the number that does not fit.
        """
        started = self._clock()
        lengths = self._row_lengths(lengths_tokens)
        later = self._row_lengths(later_lengths_tokens)
        step = self.steps if step is None else step
        if placement is not None:
            micro_batches = micro_batches or max(map(len, placement), default=0)
        known = {name: learner.snapshot() for name, learner in self._learners.items()}
        smallest, largest = self._micro_batches(lengths, micro_batches)
        multiple = self.job.micro_batches_multiple_of
        for count in range(smallest, largest + 1, multiple):
            inputs = PlanInputs(
                lengths_tokens=lengths,
                job=self.job.layout(count),
                policy=self.policy,
                cost=self.cost,
                scales=replace(known["calibration"], slowness_RP=known["device_speed"]),
                coverage=known["coverage"],
                owed_coverage=known["coverage_balance"],
                later_lengths_tokens=later,
                placement=placement,
                pinned_LS=None if pinned_LS is None else np.asarray(pinned_LS, dtype=np.int64),
            )
            try:
                plan = plan_step(step, inputs)
            except PlanError:
                if count + multiple > largest:
                    raise
                continue
            return PlannedStep(
                plan=plan,
                samples=np.arange(len(lengths)),
                scales=inputs.scales,
                plan_ms=(self._clock() - started) * 1e3,
                wait_ms=0.0,
            )
        raise AssertionError("at least one number of micro-batches is tried")

    def _row_lengths(self, lengths_tokens: Sequence[int]) -> tuple[int, ...]:
        longest = self.job.max_sample_tokens
        for sample, tokens in enumerate(lengths_tokens):
            if not 1 <= tokens <= longest:
                raise PlanError(
                    f"sample {sample} has {tokens} tokens, must have 1 to max_sample_tokens "
                    f"{longest}; raise max_sample_tokens or leave the sample out"
                )
        return tuple(self.job.padded(int(tokens)) for tokens in lengths_tokens)

    def _micro_batches(self, lengths: tuple[int, ...], given: int | None) -> tuple[int, int]:
        """The least and the largest number to try."""
        ranks, multiple = self.job.data_parallel_size, self.job.micro_batches_multiple_of
        if given is not None:
            if given < 1 or given % multiple:
                raise PlanError(
                    f"{given} micro-batches: must be a multiple of micro_batches_multiple_of "
                    f"{multiple}"
                )
            return given, given
        largest = len(lengths) // (ranks * multiple) * multiple
        if largest < 1:
            raise PlanError(
                f"{len(lengths)} samples cannot fill {multiple} micro-batches on each of {ranks} "
                "ranks; give the step more samples"
            )
        least = -(-sum(lengths) // (ranks * self.policy.max_tokens_per_slot))
        smallest = min(-(-max(least, 1) // multiple) * multiple, largest)
        return smallest, largest

    def learn(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from a step of this planner, or of another that knew the same."""
        self.steps += 1
        for name, learner in self._learners.items():
            if name not in self._idle_learners:
                learner.update(planned, measured)

    def state_dict(self) -> dict[str, Any]:
        """What later plans depend on besides lengths; plain Python types."""
        learnt = {name: learner.state_dict() for name, learner in self._learners.items()}
        return {
            "version": _STATE_VERSION,
            "steps": self.steps,
            **{name: state for name, state in learnt.items() if state is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Take over the state of another planner of this model.

        Returns:
            What does not fit this job and starts afresh, one sentence each.

        Raises:
            StateError: if it was written by another version.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateError(
                f"planner state has version {state.get('version')}, not {_STATE_VERSION}; go on "
                "with the release that wrote it, or begin afresh"
            )
        self.steps = int(state["steps"])
        afresh = []
        for name, learner in self._learners.items():
            if name in state:
                try:
                    learner.load_state_dict(state[name])
                except ValueError as error:
                    afresh.append(f"{name} starts afresh: {error}")
        return tuple(afresh)
