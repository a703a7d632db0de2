# SPDX-License-Identifier: Apache-2.0
"""A training run on one rank: follows its steps and has its planner learn from each of them.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_figures import StepFigures
from sparsebalance_megatron.log.recording import FinishedStep
from sparsebalance_megatron.log.scalars import COUNTS_IN_LOG_LINE, LOG_LINE, PREFIX
from sparsebalance_megatron.megatron.expert_collectives import watch_expert_collectives
from sparsebalance_megatron.megatron.hooks import install_hooks
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.megatron.sequence_groups import check_lockstep_ranks, rank_place
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.profile.cells import CudaEventClock, HostClock
from sparsebalance_megatron.run.agreement import PlanMismatchError, check_shared_plan
from sparsebalance_megatron.run.sinks import StepSinks
from sparsebalance_megatron.run.step_reducer import ObservedCoverage, StepReducer
from sparsebalance_megatron.run.timing import HostTime, MicroBatchRecorder, Place


class IntegrationError(ValueError):
    """A trainer's loop and the plugin do not fit together."""


class NoTimers:
    """Timers that do nothing; hooks need an object that the schedule starts and stops."""

    def __call__(self, name: str, log_level: int | None = None) -> NoTimers:
        return self

    def start(self, barrier: bool = False) -> None:
        return None

    stop = start


class Loop:
    """Whoever owns the training loop; as it stands, a trainer that ends its steps itself."""

    def follow(
        self, model_config: Any, recorder: MicroBatchRecorder, end_step: Callable[[], object]
    ) -> None:
        """Let the recorder hear the timers of a forward that begins.

        ``end_step`` is for a loop that does not end steps itself, to be called when gradients are
        final.
        """
        if model_config.timers is None:
            model_config.timers = NoTimers()
        install_hooks(model_config, recorder, lambda: None)

    def step_ended(self, reports: list[dict[str, Tensor]], figures: Mapping[str, float]) -> None:
        """Show the figures of a step, whose micro-batches reported ``reports``."""


class PlanSource(Protocol):
    """Plans of steps, made from the lengths of coming samples, by whoever owns the data."""

    @property
    def coverage(self) -> CoverageCurves:
        """The coverage curves that plans are made from."""

    def planned(self, step: int) -> PlannedStep:
        """The plan of the step that runs, or of one that comes."""

    def plan_following(self, step: int) -> None:
        """The device is busy with ``step``: a good time to plan the next one."""

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        """Learn from a step."""


class Run:
    """One run on one rank, called by :class:`.forward_step.ForwardStep` for each forward step.

    Args:
        job: its layout; steps may have other numbers of micro-batches.
        extra_steps: what the trainer's iterations count beyond steps of this batch size.
        agreement: ranks that may share micro-batches with this one, over a backend of the host.
        after_step: called when a step has been learnt from, where state may be kept.
        token_counts: name -> tokens that were padded or lost in a plan, over all ranks.
        clock: seconds.

    ``seen`` are the running step's micro-batches on this rank, which hold what their layers
    observed; ``running`` is its plan, None before its first forward.
    """

    def __init__(
        self,
        job: Job,
        plans: PlanSource,
        loop: Loop,
        device: torch.device,
        *,
        extra_steps: int = 0,
        sinks: StepSinks | None = None,
        agreement: ProcessGroup | None = None,
        after_step: Callable[[], None] = lambda: None,
        token_counts: Callable[[StepPlan], dict[str, int]] = lambda plan: {},
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Where other ranks wait, too, say for shards of parameters, nothing hears of it.
        self._knows_collectives = check_lockstep_ranks(job.lockstep_ranks)
        self.place = place = rank_place()
        self.job = job
        self.plans = plans
        self.extra_steps = extra_steps
        self._loop = loop
        self._device = device
        self._sinks = sinks
        self._agreement = agreement
        self._after_step = after_step
        self._token_counts = token_counts
        self._host_time = HostTime(clock)
        self._step_ended_s: float | None = None
        self._recorder = MicroBatchRecorder(
            HostClock() if device.type == "cpu" else CudaEventClock(),
            backward_order=partial(backward_order, job, place.pipeline_rank),
        )
        self._reducer = StepReducer(
            job,
            place,
            buckets=plans.coverage.buckets,
            grid_size=len(plans.coverage.grid),
            device=device,
        )
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the running step has observed."""
        self.seen: list[LocalMicroBatch] = []
        self.running: PlannedStep | None = None
        self._losses: list[Tensor] = []
        self._reports: list[dict[str, Tensor]] = []
        self._hears_collectives = self._knows_collectives
        self._recorder.begin_step()

    def install(self, model_config: Any, model: Any) -> None:
        """A forward step begins: see to the hooks in Megatron's config and in the model.

        Args:
            model: the chunk that runs; None where a host does not give it, so that waiting for
                other ranks in its layers is not measured.
        """
        self._host_time.begin_forward_step()
        self._loop.follow(model_config, self._recorder, self.end_step)
        if self.job.lockstep_ranks > 1:
            self._hears_collectives &= model is not None
            if self._hears_collectives:
                watch_expert_collectives(model, self._recorder)

    def check_ended(self, planned: PlannedStep) -> None:
        """Check that no step runs, or the one that ``planned`` is for."""
        running = self.running
        if running is None or planned is running:
            return
        if planned.plan.digest() != running.plan.digest():
            raise IntegrationError(
                f"a micro-batch of step {planned.plan.step} begins, but end_step was not called "
                f"for step {running.plan.step}; call it once per step on every rank, after all "
                "micro-batches of the plan"
            )

    def begin_micro_batch(self, micro_batch: LocalMicroBatch) -> None:
        """Name the forward that is running, and keep it for the step's end."""
        step = micro_batch.step
        planned = self.plans.planned(step)
        self.check_ended(planned)
        first = self.running is None
        if first:
            self.running = planned
            self._recorder.expect(self._schedule(planned))
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position, micro_batch.segment)
        self.seen.append(micro_batch)
        # The step's first micro-batch waited for the plan.
        self._host_time.end_forward_step(plan_wait_ms=planned.wait_ms if first else 0.0)
        if first and self._agreement is not None:
            # Waits for ranks, which is no time of this plugin's.
            check_shared_plan(step, planned.plan.digest(), self._agreement)

    def end_forward(self, step: int) -> None:
        """The model's kernels are launched: time to think about the next step."""
        self.plans.plan_following(step)

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that the loop will read after the step."""
        with self._host_time.counted("hooks"):
            self._losses.append(torch.stack([loss.double(), tokens.double()]))
            self._reports.append(report)

    def problem(self, remedy: str, model_remedy: str) -> str | None:
        """Say what is missing of a whole step on this rank, for a loop that ends steps itself.

        ``remedy`` is for missing forwards, ``model_remedy`` says what to give the model where its
        attention is not the plugin's.
        """
        running, stage = self.running, self.job.stage_layers[self.place.pipeline_rank]
        forwards = sum(self._schedule(running).segments_M) if running else self.job.micro_batches
        expected = len(stage) * forwards
        if running is None or len(self.seen) != expected:
            return f"end_step after {len(self.seen)} forward steps, expected {expected}: {remedy}"
        blind = sum(len(each.observations) < len(stage[each.chunk]) for each in self.seen)
        if blind:
            return (
                f"step {running.plan.step}: {blind} of {expected} forward steps never reached the "
                "plugin's attention; build the model with run.layer_spec and give it "
                f"{model_remedy}"
            )
        return None

    @property
    def timed(self) -> bool:
        """Whether a forward of the running step was timed."""
        return self._recorder.timed

    def end_step(self) -> dict[str, float]:
        """Learn from the step and return its figures; called after the gradient reduction, on every
        rank.

        Raises:
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        planned = self.running
        assert planned is not None, "a step has forwards"
        self._recorder.wait()
        with self._host_time.counted("reduce"):
            times = self._recorder.times(collectives=self._hears_collectives)
            observed = ObservedCoverage.gather(self.seen)
            measured, executed_O = self._reducer.reduce(
                segments_M=self._schedule(planned).segments_M,
                most_segments=max(each.segments for each in planned.plan.micro_batches),
                times=times,
                observed=observed,
                loss_and_tokens=torch.stack(self._losses).sum(dim=0) if self._losses else None,
                recompute=self._recompute_totals(),
                digest=planned.plan.digest(),
            )
            measured = measured.without_waiting(planned.plan.micro_batches)
            self._stop_on_mismatch(planned.plan.step, measured)
            self.plans.finish_step(planned.plan.step, measured)
            self._after_step()
            self._host_time.add_ms("reduce", -self._reducer.waited_ms)
        previous_s, self._step_ended_s = self._step_ended_s, self._host_time.clock()
        with self._host_time.counted("log"):
            token_counts = self._token_counts(planned.plan)
            figures = StepFigures.of(planned, measured)
            logged = logged_figures(figures, token_counts)
            self._loop.step_ended(self._reports, logged)
        # What the logs take counts for the next step.
        host_ms = self._host_time.take_ms()
        if self._sinks is not None:
            with self._host_time.counted("log"):
                finished = FinishedStep(
                    iteration=self._iteration(planned.plan.step),
                    iteration_ms=None
                    if previous_s is None
                    else (self._step_ended_s - previous_s) * 1e3,
                    planned=planned,
                    measured=measured,
                    figures=figures,
                    padded_tokens=token_counts["padded-tokens"],
                    host_ms=host_ms,
                )
                self._sinks.write(finished, times, observed.pieces, executed_O)
        self.begin_step()
        return logged

    def _schedule(self, planned: PlannedStep) -> SegmentedSchedule:
        """Segments of this rank's micro-batches, in the order in which they run."""
        return planned.plan.schedule_of(self.place.data_parallel_rank)

    def _recompute_totals(self) -> Tensor | None:
        """Summed over this rank's micro-batches, without waiting for the device."""
        counts = [each.recompute for each in self.seen]
        found = [each.totals() for each in counts if each.again or each.changed]
        # A micro-batch that kept nothing counts on the host.
        totals = [copied_to(x, self._device) if x.device.type == "cpu" else x for x in found]
        return torch.stack(totals).sum(dim=0) if totals else None

    def _iteration(self, step: int) -> int:
        """The step as the trainer's own log counts it."""
        return step + 1 + self.extra_steps

    def _stop_on_mismatch(self, step: int, measured: StepMeasurement) -> None:
        if differing := measured.differing_ranks:
            if self._sinks is not None:
                self._sinks.write_mismatches(self._iteration(step), len(differing))
            raise PlanMismatchError(
                f"step {step}: ranks {list(differing)} executed another plan than rank 0; "
                "check that all ranks run the same software on the same data"
            )


def logged_figures(figures: StepFigures, token_counts: Mapping[str, int]) -> dict[str, float]:
    """Name -> value, alike on all ranks; counts of rare events where they are not zero."""
    values = {name: getattr(figures, name) for name in LOG_LINE}
    counts = {name: getattr(figures, name) for name in COUNTS_IN_LOG_LINE} | dict(token_counts)
    values |= {name: count for name, count in counts.items() if count}
    return {f"{PREFIX}/{name.replace('_', '-')}": float(of) for name, of in values.items()}


def backward_order(job: Job, stage: int, segments: SegmentedSchedule) -> list[Place]:
    """Every backward of a pipeline stage, in the order of the schedule: Megatron's, which is the
    same, where neither this rank nor one that it meets has segments."""
    schedule = job.schedule if max(segments.most_segments_M) == 1 else segments
    order = schedule(job.pipeline_stages, len(segments.segments_M), job.virtual_stages)
    return [
        (operation.chunk, operation.micro_batch, operation.segment)
        for operation in order.by_stage[stage]
        if operation.direction is Direction.BACKWARD
    ]
