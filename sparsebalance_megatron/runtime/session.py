# SPDX-License-Identifier: Apache-2.0
"""One training run with ``--sparse-balance``: built from flags, then driven by Megatron's loop.

:class:`.inputs.Inputs` is what could be checked before a process group exists; :class:`Session`
adds what needs one. Megatron calls back in three places: the dataset provider (once), the forward
step (per micro-batch) and ``finalize_model_grads_func`` (per step, on every rank).
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from sparsebalance_megatron.compat import megatron_version, saved_arguments
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.data.samples import Counts, SampleIndex
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.pipeline import schedule_name, schedule_order
from sparsebalance_megatron.plan.step_plan import JobShape, StepPlan
from sparsebalance_megatron.runtime.agreement import check_ranks_agree
from sparsebalance_megatron.runtime.data import MicroBatch, MicroBatchIterator, Schedule
from sparsebalance_megatron.runtime.inputs import Inputs, with_recompute
from sparsebalance_megatron.runtime.packed_params import MicroBatchContext
from sparsebalance_megatron.runtime.scheduler import EvaluationSchedule, Scheduler
from sparsebalance_megatron.runtime.startup_profile import shared_cost_table
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
    RankPlace,
    StepMeasurement,
    StepReducer,
)
from sparsebalance_megatron.runtime.timing import (
    FORWARD_TIMER,
    Clock,
    CudaEventClock,
    HostClock,
    MicroBatchRecorder,
    RecordingTimers,
)

STATE_ATTRIBUTE = "sparse_balance_state"
"""Attribute of Megatron's ``args`` that carries the scheduler's state into checkpoints."""


class Session:
    """State of a run on one rank, and the observer of its :class:`.forward_step.ForwardStep`."""

    def __init__(self, args: Namespace, inputs: Inputs, device: torch.device) -> None:
        self._args = args
        self._inputs = inputs
        self._device = device
        self._contexts: list[tuple[MicroBatchContext, int]] = []
        self._losses: list[Tensor] = []
        self._padded_tokens = 0
        self._reports: list[dict[str, Tensor]] = []
        self._step_ended_s: float | None = None
        self._scheduler: Scheduler | None = None
        self._log: StepLog | None = None

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the dataset provider has not run yet"
        return self._scheduler

    def dataset_provider(
        self, sample_counts: Any, vp_stage: int | None = None
    ) -> tuple[MicroBatchIterator, MicroBatchIterator | None, MicroBatchIterator | None]:
        """Megatron's ``train_valid_test_dataset_provider`` for external iterators."""
        if self._scheduler is None:
            self._start()
        inputs, args = self._inputs, self._args
        valid = test = None
        if inputs.valid is not None:
            valid = self._evaluation_iterator(inputs.valid, args.consumed_valid_samples, vp_stage)
        if inputs.test is not None:
            test = self._evaluation_iterator(inputs.test, 0, vp_stage)
        train = self._iterator(
            self.scheduler,
            inputs.train,
            vp_stage,
            training=True,
            consumed=args.consumed_train_samples,
            batch_size=args.global_batch_size,
        )
        return train, valid, test

    def _start(self) -> None:
        """Build what needs process groups; runs after Megatron has loaded any checkpoint."""
        args = self._args
        inputs = self._inputs = _with_measured_cost(self._inputs, args)
        check_ranks_agree(fingerprint(inputs))
        self._place = _rank_place()
        self._scheduler = Scheduler(
            job=inputs.job,
            policy=inputs.policy,
            cost=inputs.cost,
            coverage=CoverageCurves(
                inputs.job.layers, inputs.grid[-1], inputs.config.coverage_decay
            ),
            index=inputs.train,
            global_batch_size=args.global_batch_size,
            window=inputs.config.window,
            calibrate=inputs.config.calibration == "measured",
            clock=time.perf_counter,
        )
        self._restore()
        clock: Clock = HostClock() if self._device.type == "cpu" else CudaEventClock()
        self._recorder = MicroBatchRecorder(
            clock,
            virtual_stages=inputs.job.virtual_stages,
            micro_batches=inputs.job.micro_batches,
            backward_order=_backward_order(inputs.job, self._place.pipeline_rank),
        )
        self._reducer = StepReducer(
            inputs.job,
            self._place,
            buckets=self.scheduler.coverage.buckets,
            grid_size=len(inputs.grid),
            group=None,
            device=self._device,
        )
        self._begin_step()
        _print_rank_0(f"sparse balance: {_describe(inputs.train.counts)}")
        if inputs.config.log_dir is not None and self._place.world_rank == 0:
            self._log = StepLog(inputs.config.log_dir)
            self._log.begin_run(_run_header(inputs, args), resumed=args.iteration > 0)

    def _restore(self) -> None:
        saved = saved_arguments(self._args)
        if saved is None:
            return
        state = getattr(saved, STATE_ATTRIBUTE, None)
        if state is None:
            _print_rank_0(
                f"sparse balance: the checkpoint in {self._args.load} has no plugin state; "
                "coverage curves and cost corrections start afresh"
            )
            return
        self.scheduler.load_state_dict(state)
        setattr(self._args, STATE_ATTRIBUTE, state)

    def _iterator(
        self,
        schedule: Schedule,
        index: SampleIndex,
        vp_stage: int | None,
        *,
        training: bool,
        consumed: int,
        batch_size: int,
    ) -> MicroBatchIterator:
        chunk = vp_stage or 0
        job, args = self._inputs.job, self._args
        embeds = self._place.pipeline_rank == 0 and chunk == 0
        computes_loss = (
            self._place.pipeline_rank == job.pipeline_stages - 1 and chunk == job.virtual_stages - 1
        )
        return MicroBatchIterator(
            schedule,
            index,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            reads_tokens=embeds or computes_loss,
            training=training,
            consumed_samples=consumed,
            global_batch_size=batch_size,
            pad_to_multiple_of=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        )

    def _evaluation_iterator(
        self, index: SampleIndex, consumed: int, vp_stage: int | None
    ) -> MicroBatchIterator:
        args, job = self._args, self._inputs.job
        batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        micro_batch_size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        schedule = EvaluationSchedule(
            job=JobShape(
                data_parallel_size=job.data_parallel_size,
                micro_batches=batch_size // (micro_batch_size * job.data_parallel_size),
                stage_layers=job.stage_layers,
            ),
            policy=self._inputs.policy,
            cost=self._inputs.cost,
            coverage=self.scheduler.coverage,
            index=index,
            global_batch_size=batch_size,
        )
        return self._iterator(
            schedule, index, vp_stage, training=False, consumed=consumed, batch_size=batch_size
        )

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
        self._step = micro_batch.step
        self._recorder.bind_forward(micro_batch.chunk, micro_batch.position)
        self._contexts.append((context, len(micro_batch.plan.samples)))
        if micro_batch.chunk == 0:
            self._padded_tokens += micro_batch.cu_seqlens[-1] - micro_batch.plan.tokens

    def add_loss(self, loss: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> None:
        """Keep a micro-batch's loss, and the report that Megatron will read after the step."""
        self._losses.append(torch.stack([loss.double(), tokens.double()]))
        self._reports.append(report)

    def _begin_step(self) -> None:
        self._contexts = []
        self._losses = []
        self._padded_tokens = 0
        self._reports = []
        self._recorder.begin_step()

    def _end_step(self) -> None:
        """After the last backward and the gradient reduction, on every rank."""
        planned = self.scheduler.planned(self._step)
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
        self.scheduler.finish_step(self._step, measured)
        if self._args.save:
            setattr(self._args, STATE_ATTRIBUTE, self.scheduler.state_dict())
        self._extend_reports(planned.plan, measured)
        self._write_log(planned, measured)
        self._begin_step()

    def _extend_reports(self, plan: StepPlan, measured: StepMeasurement) -> None:
        """Add the step's figures to what Megatron logs.

        Megatron sums [value, count] over the micro-batches' reports and over ranks, but only after
        the step, so the reports of the last stage can still take what is known at its end.
        """
        busy_ms = rank_busy_ms(measured)
        expectation = plan.expectation
        predicted_ms = stage_busy_ms(expectation.forward_ms, expectation.backward_ms)
        values = {
            "imbalance": imbalance(busy_ms),
            "predicted-to-measured": predicted_ms.max() / busy_ms.max(),
            "coverage": coverage_summary(measured.coverage)["mean"],
            "tuned-samples": expectation.samples_cut + expectation.samples_raised,
        }
        counts = self._inputs.train.counts
        rare = {
            "padded-tokens": self._padded_tokens,
            "truncated-tokens": counts.truncated_tokens,
            "dropped-tokens": counts.dropped_tokens,
        }
        values |= {name: count for name, count in rare.items() if count}
        for name, value in values.items():
            pair = torch.tensor([value, 1.0], dtype=torch.float, device=self._device)
            for report in self._reports:
                report[f"sparse-balance/{name}"] = pair

    def _write_log(self, planned: Any, measured: StepMeasurement) -> None:
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
                padded_tokens=self._padded_tokens,
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


def fingerprint(inputs: Inputs) -> dict[str, str]:
    """What all ranks must share for their plans to agree: flag or file -> value or digest."""
    shared = {
        f"flag {name}": str(value)
        for name, value in asdict(inputs.config).items()
        if name not in ("log_dir", "cost_table")
    }
    return shared | {
        "job shape": str(inputs.job),
        "training samples": inputs.train.digest(),
        "cost model": str(inputs.cost),
        "megatron-core": megatron_version(),
        "torch": torch.__version__,
    }


def _with_measured_cost(inputs: Inputs, args: Namespace) -> Inputs:
    """Inputs with a cost model, profiling now if the user left that to start-up."""
    if inputs.cost is not None:
        return inputs
    _print_rank_0("sparse balance: measuring the model's layers on rank 0")
    table = shared_cost_table(sys.argv[1:], inputs.config.log_dir)
    return replace(inputs, cost=with_recompute(CostModel.fit(table), args))


def _describe(counts: Counts) -> str:
    """What became of the training documents, in one line."""
    return (
        f"{counts.documents:,} documents gave {counts.samples:,} samples of {counts.tokens:,} "
        f"tokens; {counts.split_documents:,} overlong documents split, "
        f"{counts.truncated_tokens:,} tokens truncated, {counts.dropped_documents:,} documents "
        f"({counts.dropped_tokens:,} tokens) dropped"
    )


def _run_header(inputs: Inputs, args: Namespace) -> dict[str, Any]:
    return {
        "config": asdict(inputs.config),
        "cost_source": inputs.cost.source,
        "data_parallel_size": inputs.job.data_parallel_size,
        "pipeline_stages": inputs.job.pipeline_stages,
        "virtual_stages": inputs.job.virtual_stages,
        "micro_batches": inputs.job.micro_batches,
        "layers": inputs.job.layers,
        "global_batch_size": args.global_batch_size,
        "seq_length": args.seq_length,
        "grid": list(inputs.grid),
        "counts": asdict(inputs.train.counts),
    }


def _rank_place() -> RankPlace:
    return RankPlace(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        world_rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def _backward_order(job: JobShape, stage: int) -> list[tuple[int, int]]:
    order = schedule_order(
        job.pipeline_stages,
        job.micro_batches,
        schedule_name(job.pipeline_stages, job.virtual_stages),
        job.virtual_stages,
        stage,
    )
    return [(chunk, micro_batch) for kind, chunk, micro_batch in order if kind == "backward"]


def _print_rank_0(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def distributed_provider(session: Session) -> Callable[..., Any]:
    """The session's dataset provider, marked for Megatron as called on every rank."""

    def provide(sample_counts: Any, vp_stage: int | None = None) -> Any:
        return session.dataset_provider(sample_counts, vp_stage)

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide
