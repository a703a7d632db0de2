# SPDX-License-Identifier: Apache-2.0
"""Watches training steps through Megatron's config and closes the loop to the scheduler."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.runtime.data import MicroBatch
from sparsebalance_megatron.runtime.packed_params import MicroBatchContext
from sparsebalance_megatron.runtime.scheduler import PlannedStep, Scheduler
from sparsebalance_megatron.runtime.step_log import (
    StepLog,
    coverage_summary,
    imbalance,
    rank_busy_ms,
    stage_busy_ms,
    step_record,
)
from sparsebalance_megatron.runtime.telemetry import (
    PlanMismatchError,
    StepMeasurement,
    StepReducer,
)
from sparsebalance_megatron.runtime.timing import (
    FORWARD_TIMER,
    MicroBatchRecorder,
    RecordingTimers,
)

STATE_ATTRIBUTE = "sparse_balance_state"
"""Attribute of Megatron's ``args`` that carries the scheduler's state into checkpoints."""


class StepMonitor:
    """The :class:`.forward_step.StepObserver` of a training run on one rank.

    Args:
        args: Megatron's; the scheduler's state is put there, where checkpoints take it along.
        lost_tokens: name -> tokens of the data set that training never sees; logged if not zero.
        pad_to_multiple_of: rows are padded to this many tokens.
        log: written after every step; None on ranks without one.
    """

    def __init__(
        self,
        args: Namespace,
        *,
        scheduler: Scheduler,
        recorder: MicroBatchRecorder,
        reducer: StepReducer,
        lost_tokens: Mapping[str, int],
        pad_to_multiple_of: int,
        device: torch.device,
        log: StepLog | None,
    ) -> None:
        self._args = args
        self._scheduler = scheduler
        self._recorder = recorder
        self._reducer = reducer
        self._lost_tokens = lost_tokens
        self._pad_to_multiple_of = pad_to_multiple_of
        self._device = device
        self._log = log
        self._step_ended_s: float | None = None
        self._begin_step()

    def _begin_step(self) -> None:
        self._contexts: list[tuple[MicroBatchContext, int]] = []
        self._losses: list[Tensor] = []
        self._reports: list[dict[str, Tensor]] = []
        self._recorder.begin_step()

    def install(self, model_config: Any) -> None:
        """Put the hooks into Megatron's config; lazily, because its loop resets both attributes."""
        timers = model_config.timers
        if timers is not None and not isinstance(timers, RecordingTimers):
            model_config.timers = RecordingTimers(timers, self._recorder)
            # The forward that brought us here began before its timer could be watched.
            self._recorder.start(FORWARD_TIMER)
        finalize = model_config.finalize_model_grads_func
        if finalize is not None and not isinstance(finalize, _ReportingFinalize):
            model_config.finalize_model_grads_func = _ReportingFinalize(
                self._recorder.end_schedule, finalize, self._end_step
            )

    def begin_micro_batch(self, micro_batch: MicroBatch, context: MicroBatchContext) -> None:
        """Name the forward that is running, and keep its context for the step's end."""
        self._step = micro_batch.step
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position)
        self._contexts.append((context, len(micro_batch.plan.samples)))

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that Megatron will read after the step."""
        self._losses.append(torch.stack([loss.double(), tokens.double()]))
        self._reports.append(report)

    def _end_step(self) -> None:
        """After the last backward and the gradient reduction, on every rank.

        Raises:
            PlanMismatchError: on all ranks alike, if they executed different plans.
        """
        planned = self._scheduler.planned(self._step)
        forward_VM, backward_VM = self._recorder.elapsed_ms()
        measured = self._reducer.reduce(
            forward_VM=forward_VM,
            backward_VM=backward_VM,
            schedule_ms=self._recorder.schedule_ms(),
            contexts=self._contexts,
            loss_and_tokens=torch.stack(self._losses).sum(dim=0) if self._losses else None,
            digest=planned.plan.digest(),
        )
        if measured.digest_mismatches:
            raise PlanMismatchError(
                f"step {self._step}: {measured.digest_mismatches} ranks executed another plan than "
                "rank 0; check that all ranks run the same software on the same data"
            )
        self._scheduler.finish_step(self._step, measured)
        if self._args.save:
            setattr(self._args, STATE_ATTRIBUTE, self._scheduler.state_dict())
        self._extend_reports(planned, measured)
        self._write_log(planned, measured)
        self._begin_step()

    def _extend_reports(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Add the step's figures to what Megatron logs.

        Megatron sums [value, count] over the micro-batches' reports and over ranks, but only after
        the step, so the reports of the last stage can still take what is known at its end.
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
        rare = {"padded-tokens": self._padded_tokens(planned), **self._lost_tokens}
        values |= {name: count for name, count in rare.items() if count}
        for name, value in values.items():
            pair = torch.tensor([value, 1.0], dtype=torch.float, device=self._device)
            for report in self._reports:
                report[f"sparse-balance/{name}"] = pair

    def _padded_tokens(self, planned: PlannedStep) -> int:
        """Over all data-parallel ranks."""
        return sum(
            -micro_batch.tokens % self._pad_to_multiple_of
            for rank in planned.plan.ranks
            for micro_batch in rank.micro_batches
        )

    def _write_log(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        now_s = time.perf_counter()
        previous_s, self._step_ended_s = self._step_ended_s, now_s
        if self._log is None:
            return
        self._log.append(
            step_record(
                iteration=self._step + 1,
                iteration_ms=None if previous_s is None else (now_s - previous_s) * 1e3,
                planned=planned,
                measured=measured,
                padded_tokens=self._padded_tokens(planned),
            )
        )


class _ReportingFinalize:
    """Wraps ``finalize_model_grads_func``: the one place every rank passes once per step."""

    def __init__(
        self,
        before: Callable[[], None],
        finalize: Callable[..., Any],
        after: Callable[[], None],
    ) -> None:
        self._before = before
        self._finalize = finalize
        self._after = after

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._before()
        result = self._finalize(*arguments, **keywords)
        self._after()
        return result
