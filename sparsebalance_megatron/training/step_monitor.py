# SPDX-License-Identifier: Apache-2.0
"""Watches training steps through Megatron's config and closes the loop to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.megatron.packed_seq_params import MicroBatchContext
from sparsebalance_megatron.megatron.timers import (
    FORWARD_TIMER,
    RecordingTimers,
    ReportingFinalize,
)
from sparsebalance_megatron.plan.measurement import StepMeasurement, StepTimes
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.scheduler import Scheduler
from sparsebalance_megatron.telemetry.step_log import (
    coverage_summary,
    imbalance,
    rank_busy_ms,
    stage_busy_ms,
)
from sparsebalance_megatron.training.data_iterator import MicroBatch
from sparsebalance_megatron.training.host_time import HostTime
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage
from sparsebalance_megatron.training.sinks import FinishedStep, StepOutputs
from sparsebalance_megatron.training.step_reducer import PlanMismatchError, StepReducer
from sparsebalance_megatron.training.timing import MicroBatchRecorder


class StepMonitor:
    """The :class:`.forward_step.StepObserver` of a training run on one rank.

    Args:
        after_step: called when a step has been learnt from, where state may be kept.
        lost_tokens: name -> tokens of the data set that training never sees; logged if not zero.
        pad_to_multiple_of: rows are padded to this many tokens.
        outputs: get every finished step.
        clock: seconds.

    ``figures`` are those of the last step that Megatron's log line shows.
    """

    def __init__(
        self,
        *,
        after_step: Callable[[], None],
        scheduler: Scheduler,
        recorder: MicroBatchRecorder,
        reducer: StepReducer,
        lost_tokens: Mapping[str, int],
        pad_to_multiple_of: int,
        device: torch.device,
        outputs: StepOutputs,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._after_step = after_step
        self._scheduler = scheduler
        self._recorder = recorder
        self._reducer = reducer
        self._lost_tokens = lost_tokens
        self._pad_to_multiple_of = pad_to_multiple_of
        self._device = device
        self._outputs = outputs
        self._clock = clock
        self._host_time = HostTime(clock)
        self._forward_step_began_s: float | None = None
        self._step_ended_s: float | None = None
        self.figures: dict[str, float] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._contexts: list[tuple[MicroBatchContext, int]] = []
        self._losses: list[Tensor] = []
        self._reports: list[dict[str, Tensor]] = []
        self._recorder.begin_step()

    def install(self, model_config: Any, after_finalize: Callable[[], None] | None = None) -> None:
        """Put the hooks into Megatron's config; lazily, because its loop resets both attributes.

        Args:
            after_finalize: called when gradients are final, in place of :meth:`end_step`.
        """
        self._forward_step_began_s = self._clock()
        timers = model_config.timers
        if timers is not None and not isinstance(timers, RecordingTimers):
            model_config.timers = RecordingTimers(timers, self._recorder)
            # The forward that brought us here began before its timer could be watched.
            self._recorder.start(FORWARD_TIMER)
        finalize = model_config.finalize_model_grads_func
        if finalize is not None and not isinstance(finalize, ReportingFinalize):
            model_config.finalize_model_grads_func = ReportingFinalize(
                self._recorder.end_schedule, finalize, after_finalize or self.end_step
            )

    def begin_micro_batch(self, micro_batch: MicroBatch, context: MicroBatchContext) -> None:
        """Name the forward that is running, and keep its context for the step's end."""
        self._step = micro_batch.step
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position)
        self._contexts.append((context, len(micro_batch.plan.samples)))
        self._count_forward_step()

    def end_forward(self, micro_batch: MicroBatch) -> None:
        """The model's kernels are launched: time to think about the next step."""
        self._scheduler.plan_following(micro_batch.step)

    def _count_forward_step(self) -> None:
        """Everything since the forward step began; the step's first one waited for the plan."""
        began_s, self._forward_step_began_s = self._forward_step_began_s, None
        if began_s is None:
            return
        plan_ms = 0.0
        if len(self._contexts) == 1:
            passed_ms = (self._clock() - began_s) * 1e3
            plan_ms = min(self._scheduler.planned(self._step).wait_ms, passed_ms)
            self._host_time.add_ms("plan", plan_ms)
        self._host_time.add_since(began_s, "hooks", without_ms=plan_ms)

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that Megatron will read after the step."""
        began_s = self._clock()
        self._losses.append(torch.stack([loss.double(), tokens.double()]))
        self._reports.append(report)
        self._host_time.add_since(began_s, "hooks")

    def end_step(self) -> None:
        """After the last backward and the gradient reduction, on every rank.

        Raises:
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        self._recorder.wait()
        began_s = self._clock()
        planned = self._scheduler.planned(self._step)
        times = self._recorder.times()
        observed = ObservedCoverage.gather(self._contexts)
        measured = self._reducer.reduce(
            times=times,
            observed=observed,
            loss_and_tokens=torch.stack(self._losses).sum(dim=0) if self._losses else None,
            digest=planned.plan.digest(),
        )
        self._stop_on_mismatch(measured)
        self._scheduler.finish_step(self._step, measured)
        self._after_step()
        self._host_time.add_since(began_s, "reduce", without_ms=self._reducer.waited_ms)
        self._show(planned, measured, times, observed)
        self._begin_step()

    def _stop_on_mismatch(self, measured: StepMeasurement) -> None:
        if measured.digest_mismatches:
            self._outputs.write_mismatches(self._step + 1, measured.digest_mismatches)
            raise PlanMismatchError(
                f"step {self._step}: {measured.digest_mismatches} ranks executed another plan than "
                "rank 0; check that all ranks run the same software on the same data"
            )

    def _show(
        self,
        planned: PlannedStep,
        measured: StepMeasurement,
        times: StepTimes,
        observed: ObservedCoverage,
    ) -> None:
        """To Megatron's log line and the outputs; what the latter take counts for the next step."""
        began_s = self._clock()
        padded_tokens = self._padded_tokens(planned)
        self._extend_reports(planned, measured, padded_tokens)
        previous_s, self._step_ended_s = self._step_ended_s, began_s
        self._host_time.add_since(began_s, "log")
        handing_over_s = self._clock()
        self._outputs.write(
            FinishedStep(
                iteration=self._step + 1,
                iteration_ms=None if previous_s is None else (began_s - previous_s) * 1e3,
                planned=planned,
                measured=measured,
                padded_tokens=padded_tokens,
                times=times,
                observed=observed,
                host_ms=self._host_time.take_ms(),
            )
        )
        self._host_time.add_since(handing_over_s, "log")

    def _extend_reports(
        self, planned: PlannedStep, measured: StepMeasurement, padded_tokens: int
    ) -> None:
        """Add the step's figures to what Megatron logs.

        Megatron reads the micro-batches' reports only after the step, so those of the last stage
        can still take what is known at its end. Of a single value it takes the mean over
        micro-batches and asks no other rank, where all have the same.
        """
        busy_ms = rank_busy_ms(measured)
        expectation = planned.plan.expectation
        predicted_ms = stage_busy_ms(expectation.forward_ms, expectation.backward_ms)
        values = {
            "imbalance": imbalance(busy_ms),
            "predicted-to-measured": predicted_ms.max() / busy_ms.max(),
            "coverage": coverage_summary(measured.coverage)["mean"],
            "tuned-samples": expectation.samples_cut + expectation.samples_raised,
        }
        rare = {"padded-tokens": padded_tokens, **self._lost_tokens}
        values |= {name: count for name, count in rare.items() if count}
        self.figures = {f"sparse-balance/{name}": float(value) for name, value in values.items()}
        if self._reports:
            values_on_device = torch.tensor(
                list(self.figures.values()), dtype=torch.float, device=self._device
            ).unbind()
            added = dict(zip(self.figures, values_on_device, strict=True))
            for report in self._reports:
                report.update(added)

    def _padded_tokens(self, planned: PlannedStep) -> int:
        """Over all data-parallel ranks."""
        return sum(
            -micro_batch.tokens % self._pad_to_multiple_of for micro_batch in planned.plan.slots
        )
