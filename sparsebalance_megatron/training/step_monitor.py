# SPDX-License-Identifier: Apache-2.0
"""Follows the training steps of one rank, and closes the loop to the scheduler at their end.

Shape legend: R data-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.learn.measurement import StepMeasurement, StepTimes
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron.packed_seq_params import MicroBatchContext
from sparsebalance_megatron.megatron.timers import install_hooks
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms
from sparsebalance_megatron.plan.step_plan import Expectation
from sparsebalance_megatron.telemetry.scalars import PREFIX
from sparsebalance_megatron.telemetry.step_record import FinishedStep
from sparsebalance_megatron.training.data_iterator import LocalMicroBatch
from sparsebalance_megatron.training.host_time import HostTime
from sparsebalance_megatron.training.inputs import CostedInputs
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage
from sparsebalance_megatron.training.plan_agreement import require_agreement
from sparsebalance_megatron.training.rows import RowPacking
from sparsebalance_megatron.training.sinks import StepSinks
from sparsebalance_megatron.training.step_reducer import PlanMismatchError, StepReducer
from sparsebalance_megatron.training.timing import MicroBatchRecorder


class StepMonitor:
    """The :class:`.forward_step.StepObserver` of a training run on one rank.

    Args:
        after_step: called when a step has been learnt from, where state may be kept.
        extra_steps: what the trainer's iterations count beyond steps of this batch size.
        packing: how the run's rows lie on ranks.
        sinks: get every finished step.
        clock: seconds.

    ``seen`` holds the running step's micro-batches on this rank, with what their layers observed.
    ``figures`` are those of the last step that Megatron's log line shows.
    """

    def __init__(
        self,
        inputs: CostedInputs,
        *,
        after_step: Callable[[], None],
        extra_steps: int,
        scheduler: Scheduler,
        recorder: MicroBatchRecorder,
        reducer: StepReducer,
        device: torch.device,
        packing: RowPacking,
        sinks: StepSinks,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._after_step = after_step
        self._extra_steps = extra_steps
        self._scheduler = scheduler
        self._recorder = recorder
        self._reducer = reducer
        self._inputs = inputs
        self._device = device
        self._packing = packing
        self._sinks = sinks
        self._host_time = HostTime(clock)
        self._step_ended_s: float | None = None
        self.figures: dict[str, float] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self.seen: list[tuple[LocalMicroBatch, MicroBatchContext]] = []
        self._losses: list[Tensor] = []
        self._reports: list[dict[str, Tensor]] = []
        self._recorder.begin_step()

    def install(self, model_config: Any, after_finalize: Callable[[], None] | None = None) -> None:
        """A forward step begins: see to the hooks in Megatron's config.

        Args:
            after_finalize: called when gradients are final, in place of :meth:`end_step`.
        """
        self._host_time.begin_forward_step()
        install_hooks(model_config, self._recorder, after_finalize or self.end_step)

    def begin_micro_batch(self, micro_batch: LocalMicroBatch, context: MicroBatchContext) -> None:
        """Name the forward that is running, and keep its context for the step's end.

        Raises:
            PlanMismatchError: if ranks that may share rows planned different steps.
        """
        self._step = micro_batch.step
        if not self.seen:
            self._recorder.expect(self._scheduler.planned(self._step).micro_batches)
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position)
        # The step's first micro-batch waited for the plan.
        wait_ms = 0.0 if self.seen else self._scheduler.planned(self._step).wait_ms
        first = not self.seen
        self.seen.append((micro_batch, context))
        self._host_time.end_forward_step(plan_wait_ms=wait_ms)
        if first and self._packing.groups is not None:
            # Waits for ranks, which is no time of this plugin's.
            digest = self._scheduler.planned(self._step).plan.digest()
            require_agreement(self._step, digest, self._packing.groups.agreement)

    def end_forward(self, micro_batch: LocalMicroBatch) -> None:
        """The model's kernels are launched: time to think about the next step."""
        self._scheduler.plan_following(micro_batch.step)

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that Megatron will read after the step."""
        with self._host_time.counted("hooks"):
            self._losses.append(torch.stack([loss.double(), tokens.double()]))
            self._reports.append(report)

    def end_step(self) -> None:
        """After the last backward and the gradient reduction, on every rank.

        Raises:
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        self._recorder.wait()
        with self._host_time.counted("reduce"):
            planned = self._scheduler.planned(self._step)
            times = self._recorder.times()
            observed = ObservedCoverage.gather(self.seen)
            measured = self._reducer.reduce(
                times=times,
                observed=observed,
                loss_and_tokens=torch.stack(self._losses).sum(dim=0) if self._losses else None,
                recompute=self._recompute_totals(),
                digest=planned.plan.digest(),
            ).without_waiting(planned.plan.slots)
            self._stop_on_mismatch(measured)
            self._scheduler.finish_step(self._step, measured)
            self._after_step()
            self._host_time.add_ms("reduce", -self._reducer.waited_ms)
        self._show(planned, measured, times, observed)
        self._begin_step()

    def _recompute_totals(self) -> Tensor | None:
        """Summed over this rank's micro-batches, without waiting for the device."""
        counts = [context.recompute for _, context in self.seen]
        totals = [each.totals().to(self._device) for each in counts if each.again or each.changed]
        return torch.stack(totals).sum(dim=0) if totals else None

    @property
    def _iteration(self) -> int:
        """Of the running step, as the trainer's own log counts it."""
        return self._step + 1 + self._extra_steps

    def _stop_on_mismatch(self, measured: StepMeasurement) -> None:
        if differing := measured.differing_ranks:
            self._sinks.write_mismatches(self._iteration, len(differing))
            raise PlanMismatchError(
                f"step {self._step}: ranks {list(differing)} executed another plan than rank 0; "
                "check that all ranks run the same software on the same data"
            )

    def _show(
        self,
        planned: PlannedStep,
        measured: StepMeasurement,
        times: StepTimes,
        observed: ObservedCoverage,
    ) -> None:
        """To Megatron's log line and the sinks; what the latter take counts for the next step."""
        previous_s, self._step_ended_s = self._step_ended_s, self._host_time.clock()
        with self._host_time.counted("log"):
            counts = self._inputs.train.counts
            # Over all data-parallel ranks.
            padded_tokens = sum(map(self._packing.padded_tokens, planned.plan.slots))
            rare_counts = {
                "padded-tokens": padded_tokens,
                "unobserved": measured.coverage.unobserved,
                "truncated-tokens": counts.truncated_tokens,
                "dropped-tokens": counts.dropped_tokens,
                "attended-again": measured.recompute.again,
                "recomputed-otherwise": measured.recompute.otherwise,
            }
            self.figures = step_figures(planned.plan.expectation, measured, rare_counts)
            extend_reports(self._reports, self.figures, self._device)
        host_ms = self._host_time.take_ms()
        with self._host_time.counted("log"):
            finished = FinishedStep(
                iteration=self._iteration,
                iteration_ms=None
                if previous_s is None
                else (self._step_ended_s - previous_s) * 1e3,
                planned=planned,
                measured=measured,
                padded_tokens=padded_tokens,
                host_ms=host_ms,
            )
            self._sinks.write(finished, times, observed)


def step_figures(
    expectation: Expectation, measured: StepMeasurement, rare_counts: Mapping[str, int]
) -> dict[str, float]:
    """Name -> value, alike on all ranks.

    Args:
        rare_counts: name -> tokens that were padded or lost, pairs without coverage, or layers
            whose recomputed pass did not go as planned; shown where they are not zero.
    """
    busy_R = rank_busy_ms(measured.times_2RPVM)
    predicted_R = rank_busy_ms(expectation.times_2RPVM)
    values = {
        "imbalance": imbalance(busy_R),
        "predicted-to-measured": predicted_R.max() / busy_R.max(),
        "coverage": measured.coverage.executed_mean,
        "tuned-samples": expectation.samples_cut + expectation.samples_raised,
    }
    values |= {name: count for name, count in rare_counts.items() if count}
    return {f"{PREFIX}/{name}": float(value) for name, value in values.items()}


def extend_reports(
    reports: Iterable[dict[str, Tensor]], figures: Mapping[str, float], device: torch.device
) -> None:
    """Add figures to what Megatron logs.

    Megatron reads the micro-batches' reports only after the step, so those of the last stage can
    still take what is known at its end. Of a single value it takes the mean over micro-batches and
    asks no other rank, where all have the same.
    """
    reports = list(reports)
    if not reports:
        return
    values = torch.tensor(list(figures.values()), dtype=torch.float, device=device).unbind()
    for report in reports:
        report.update(zip(figures, values, strict=True))
