# SPDX-License-Identifier: Apache-2.0
"""A training run on one rank: follows its steps and has its planner learn from each of them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.learn.measurement import StepFigures, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.records import FinishedStep
from sparsebalance_megatron.megatron.hooks import (
    install_hooks,
    leave_out_padding,
    use_true_positions,
)
from sparsebalance_megatron.megatron.packed_seq_params import (
    BudgetedPackedSeqParams,
    LocalMicroBatch,
)
from sparsebalance_megatron.megatron.sequence_groups import check_lockstep_ranks, rank_place
from sparsebalance_megatron.megatron.timing import (
    CudaEventClock,
    HostClock,
    MicroBatchRecorder,
    Place,
    watch_expert_collectives,
)
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job, lockstep_notice
from sparsebalance_megatron.plan.pipeline.orders import PipelineOrder
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.agreement import (
    PlanMismatchError,
    check_executed_plans,
    check_shared_plan,
    print_rank_0,
    shown,
)
from sparsebalance_megatron.run.sinks import PREFIX, StepSinks
from sparsebalance_megatron.run.step_reducer import ObservedCoverage, StepReducer

PARTS = ("plan", "hooks", "reduce", "log")


class IntegrationError(ValueError):
    """A trainer's loop and the plugin do not fit together."""


class HostTime:
    """ms of the current step that this rank spent in the plugin, where training waited for it.

    - ``plan``: waiting for the step's plan.
    - ``hooks``: everything else between the start of a forward step and the model, and around the
      loss: reading, packing, layout, bookkeeping.
    - ``reduce``: gathering measurements at the step's end and learning from them, without the time
      that the device or other ranks take to get there.
    - ``log``: what Megatron's log line gets, and handing over to the logs, that of the step before
      included.

    ``clock`` gives seconds; ``ms`` are the sums by part.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.ms = dict.fromkeys(PARTS, 0.0)
        self._forward_step_began_s: float | None = None

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Count what passes within, for a part."""
        began_s = self.clock()
        yield
        self.ms[part] += (self.clock() - began_s) * 1e3

    def begin_forward_step(self) -> None:
        """Begin to count for the plugin, until :meth:`end_forward_step`."""
        self._forward_step_began_s = self.clock()

    def end_forward_step(self, *, plan_wait_ms: float) -> None:
        """Count the time since the forward step began, of which so much was spent waiting for the
        plan; nothing where its begin was not seen."""
        began_s, self._forward_step_began_s = self._forward_step_began_s, None
        if began_s is None:
            return
        passed_ms = (self.clock() - began_s) * 1e3
        plan_ms = min(plan_wait_ms, passed_ms)
        self.ms["plan"] += plan_ms
        self.ms["hooks"] += passed_ms - plan_ms


class Run:
    """The steps of one run on one rank: measured, compared with their plans and learnt from.

    Args:
        job: its layout; steps may have other numbers of micro-batches.
        ends_steps: whether a step ends when Megatron's loop has final gradients, whose log line
            then has the step's figures. Otherwise the trainer calls :meth:`end_whole_step`.
        extra_steps: what the trainer's iterations count beyond steps of this batch size.
        agreement: see :attr:`.SequencePacking.agreement`.
        leaves_attention: whether layers keep attention of their own, which observes nothing.
        token_counts: name -> tokens that were padded or lost in a plan, over all ranks.

    ``sinks`` are what logs steps, if anything does. ``seen`` are the running step's micro-batches
    on this rank, which hold what their layers observed; ``running`` is its plan, None before its
    first forward.
    """

    def __init__(
        self,
        job: Job,
        coverage: CoverageCurves,
        learn: Callable[[PlannedStep, StepMeasurement], None],
        device: torch.device,
        *,
        ends_steps: bool = False,
        extra_steps: int = 0,
        agreement: ProcessGroup | None = None,
        leaves_attention: bool = False,
        token_counts: Callable[[StepPlan], dict[str, int]] = lambda plan: {},
    ) -> None:
        # Where other ranks wait, too, say for shards of parameters, nothing hears of it.
        self._knows_collectives = check_lockstep_ranks(job.lockstep_ranks)
        self.place = place = rank_place()
        self.job = job
        self.extra_steps = extra_steps
        self._learn = learn
        self._ends_steps = ends_steps
        self._device = device
        self.sinks: StepSinks | None = None
        self._agreement = agreement
        self._token_counts = token_counts
        self._grid_budgets = len(coverage.grid) if leaves_attention else None
        self._host_time = HostTime()
        self._step_ended_s: float | None = None
        clock = HostClock() if device.type == "cpu" else CudaEventClock()
        self._recorder = MicroBatchRecorder(clock)
        self._reducer = StepReducer(
            *(job, place), buckets=coverage.buckets, grid_size=len(coverage.grid), device=device
        )
        self.begin_step()
        if notice := lockstep_notice(job.lockstep_ranks):
            print_rank_0(notice)

    def begin_step(self) -> None:
        """Forget what the running step has observed."""
        self.seen: list[LocalMicroBatch] = []
        self.running: PlannedStep | None = None
        self._losses: list[Tensor] = []
        self._reports: list[dict[str, Tensor]] = []
        self._hears_collectives = self._knows_collectives
        self._recorder.begin_step()

    def install(self, model_config: Any, model: Any) -> None:
        """A forward step begins: see to the hooks in Megatron's config and in the chunk that runs.

        Where a host does not give the chunk, waiting for other ranks in its layers is not measured.
        """
        self._host_time.begin_forward_step()
        end_step = self.end_step if self._ends_steps else lambda: None
        install_hooks(model_config, self._recorder, end_step)
        if self.job.lockstep_ranks > 1:
            self._hears_collectives &= model is not None
            if self._hears_collectives:
                watch_expert_collectives(model, self._recorder)

    def begin_micro_batch(
        self, micro_batch: LocalMicroBatch, model: Any, planned: PlannedStep | None
    ) -> BudgetedPackedSeqParams:
        """A forward begins; what the model must be given.

        Args:
            model: the chunk that runs, which gets its hooks; None where a host does not give it.
            planned: the training step that measures and observes the forward; None outside of one.
        """
        if model is not None:
            if micro_batch.sequence is not None:
                use_true_positions(model)
            leave_out_padding(model)
        if planned is not None:
            self._follow(micro_batch, planned)
        return micro_batch.params()

    def _follow(self, micro_batch: LocalMicroBatch, planned: PlannedStep) -> None:
        """Name the forward that runs, and keep it for the end of its step."""
        running, step = self.running, planned.plan.step
        first = running is None
        if running is None:
            self.running = planned
            self._order = planned.order(self.place.data_parallel_rank, self.job)
            self._recorder.backward_order = backward_order(self._order, self.place.pipeline_rank)
        elif planned is not running and planned.plan.digest() != running.plan.digest():
            raise IntegrationError(
                f"a micro-batch of step {step} begins, but end_step was not called for step "
                f"{running.plan.step}; call it once per step on every rank, after all "
                "micro-batches of the plan"
            )
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position, micro_batch.segment)
        self.seen.append(micro_batch)
        if self._grid_budgets is not None and micro_batch.observe:
            stage = self.job.stage_layers[self.place.pipeline_rank]
            micro_batch.observe_everything(stage[micro_batch.chunk], self._grid_budgets)
        # The step's first micro-batch waited for the plan.
        self._host_time.end_forward_step(plan_wait_ms=planned.wait_ms if first else 0.0)
        if first and self._agreement is not None:
            # Waits for ranks, which is no time of this plugin's.
            check_shared_plan(step, planned.plan.digest(), self._agreement)

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that the loop will read after the step."""
        with self._host_time.counted("hooks"):
            self._losses.append(torch.stack([loss.double(), tokens.double()]))
            self._reports.append(report)

    def end_whole_step(self) -> dict[str, float]:
        """End a step where the trainer calls."""
        problem = self._problem()
        digest = b"" if self.running is None else self.running.plan.digest()
        failing = check_executed_plans(problem is not None, digest, self._device)
        if failing:
            other = f"end_step: ranks {shown(failing)} have a problem of their own to report"
            raise IntegrationError(problem or other)
        return self.end_step()

    def _problem(self) -> str | None:
        """What is missing of a whole step on this rank."""
        running, stage = self.running, self.job.stage_layers[self.place.pipeline_rank]
        forwards = int(self._order.segments_M.sum()) if running else self.job.micro_batches
        expected = len(stage) * forwards
        if running is None or len(self.seen) != expected:
            return (
                f"end_step after {len(self.seen)} forward steps, expected {expected}: call it "
                "once, when every model chunk has run each micro-batch of the plan once"
            )
        blind = sum(len(each.observations) < len(stage[each.chunk]) for each in self.seen)
        if blind:
            return (
                f"step {running.plan.step}: {blind} of {expected} forward steps never reached the "
                "plugin's attention; build the model with run.layer_spec and give it the plugin's "
                "packed_seq_params"
            )
        if not self._recorder.wait():
            return (
                "end_step: no forward was timed; give begin_host_run the config object that the "
                "model holds"
            )
        return None

    def end_step(self) -> dict[str, float]:
        """Learn from the step and return its figures; called after the gradient reduction, on every
        rank. Raises a :class:`PlanMismatchError` on all of them if they executed different plans.
        """
        planned = self.running
        assert planned is not None, "a step has forwards"
        step = planned.plan.step
        iteration = step + 1 + self.extra_steps
        self._recorder.wait()
        with self._host_time.counted("reduce"):
            times = self._recorder.times(collectives=self._hears_collectives)
            observed = ObservedCoverage.gather(self.seen, self._reducer.buckets)
            measured, executed_O = self._reducer.reduce(
                segments_M=self._order.segments_M,
                most_segments=max(each.segments for each in planned.plan.micro_batches),
                times=times,
                observed=observed,
                loss_and_tokens=torch.stack(self._losses).sum(dim=0) if self._losses else None,
                digest=planned.plan.digest(),
            )
            measured = measured.without_waiting(planned.plan.micro_batches)
            if differing := measured.differing_ranks:
                raise PlanMismatchError(
                    f"step {step}: ranks {list(differing)} executed another plan than rank 0; "
                    "check that all ranks run the same software on the same data"
                )
            self._learn(planned, measured)
            self._host_time.ms["reduce"] -= self._reducer.waited_ms
        previous_s, self._step_ended_s = self._step_ended_s, self._host_time.clock()
        iteration_ms = None if previous_s is None else (self._step_ended_s - previous_s) * 1e3
        with self._host_time.counted("log"):
            token_counts = self._token_counts(planned.plan)
            figures = StepFigures.of(planned, measured)
            lost = {name: float(count) for name, count in token_counts.items() if count}
            logged = {f"{PREFIX}/{name}": of for name, of in (figures.log_line() | lost).items()}
            if self._ends_steps:
                add_figures(self._reports, logged, self._device)
        # What the logs take counts for the next step.
        host_ms, self._host_time.ms = self._host_time.ms, dict.fromkeys(PARTS, 0.0)
        if self.sinks is not None:
            with self._host_time.counted("log"):
                finished = FinishedStep(
                    iteration=iteration,
                    iteration_ms=iteration_ms,
                    planned=planned,
                    measured=measured,
                    figures=figures,
                    padded_tokens=token_counts["padded-tokens"],
                    host_ms=host_ms,
                    times=times,
                    pieces=observed.pieces,
                    executed_O=executed_O,
                )
                self.sinks.write(finished)
        self.begin_step()
        return logged


def add_figures(
    reports: Sequence[dict[str, Tensor]], figures: Mapping[str, float], device: torch.device
) -> None:
    """Add a step's figures to what Megatron logs of it: it reads the micro-batches' reports only
    after the step, and averages a single value over micro-batches alone."""
    if reports:
        values = copied_to(torch.tensor(list(figures.values()), dtype=torch.float), device)
        for report in reports:
            report.update(zip(figures, values.unbind(), strict=True))


def backward_order(order: PipelineOrder, stage: int) -> list[Place]:
    """Every backward of a pipeline stage, as they follow one another."""
    return [
        (operation.chunk, operation.micro_batch, operation.segment)
        for operation in order.by_stage[stage]
        if operation.direction is Direction.BACKWARD
    ]
