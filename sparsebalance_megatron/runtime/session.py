# SPDX-License-Identifier: Apache-2.0
"""One training run with ``--sparse-balance``: built from flags, then driven by Megatron's loop.

:class:`.inputs.Inputs` is what could be checked before a process group exists; :class:`Session`
adds what needs one. Megatron calls back in three places: the dataset provider (once), the forward
step (per micro-batch) and, in the monitor, ``finalize_model_grads_func`` (per step, on every rank).
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

from sparsebalance_megatron.compat import saved_arguments
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.pipeline import schedule_name, schedule_order
from sparsebalance_megatron.plan.step_plan import JobShape
from sparsebalance_megatron.runtime.agreement import check_ranks_agree
from sparsebalance_megatron.runtime.data import MicroBatchIterator, Schedule
from sparsebalance_megatron.runtime.inputs import Inputs, fingerprint, with_recompute
from sparsebalance_megatron.runtime.monitor import STATE_ATTRIBUTE, StepMonitor
from sparsebalance_megatron.runtime.scheduler import EvaluationSchedule, Scheduler
from sparsebalance_megatron.runtime.startup_profile import shared_cost_table
from sparsebalance_megatron.runtime.step_log import StepLog
from sparsebalance_megatron.runtime.telemetry import RankPlace, StepReducer
from sparsebalance_megatron.runtime.timing import CudaEventClock, HostClock, MicroBatchRecorder


class Session:
    """A run on one rank. ``monitor`` exists once the dataset provider has run."""

    monitor: StepMonitor

    def __init__(self, args: Namespace, inputs: Inputs, device: torch.device) -> None:
        self._args = args
        self._inputs = inputs
        self._device = device
        self._pad_to_multiple_of = args.tensor_model_parallel_size if args.sequence_parallel else 1
        self._scheduler: Scheduler | None = None

    def dataset_provider(
        self, sample_counts: Any, vp_stage: int | None = None
    ) -> tuple[MicroBatchIterator, MicroBatchIterator | None, MicroBatchIterator | None]:
        """Megatron's ``train_valid_test_dataset_provider`` for external iterators."""
        scheduler = self._scheduler or self._start()
        inputs, args = self._inputs, self._args
        valid = test = None
        if inputs.valid is not None:
            valid = self._evaluation_iterator(inputs.valid, args.consumed_valid_samples, vp_stage)
        if inputs.test is not None:
            test = self._evaluation_iterator(inputs.test, 0, vp_stage)
        train = self._iterator(
            scheduler,
            inputs.train,
            vp_stage,
            training=True,
            consumed=args.consumed_train_samples,
            batch_size=args.global_batch_size,
        )
        return train, valid, test

    def _start(self) -> Scheduler:
        """Build what needs process groups; runs after Megatron has loaded any checkpoint."""
        args = self._args
        inputs = self._inputs = _with_measured_cost(self._inputs, args)
        check_ranks_agree(fingerprint(inputs))
        self._place = _rank_place()
        self._coverage = CoverageCurves(
            inputs.job.layers, inputs.grid[-1], inputs.config.coverage_decay
        )
        self._scheduler = Scheduler(
            job=inputs.job,
            policy=inputs.policy,
            cost=inputs.cost,
            coverage=self._coverage,
            index=inputs.train,
            global_batch_size=args.global_batch_size,
            window=inputs.config.window,
            calibrate=inputs.config.calibration == "measured",
            clock=time.perf_counter,
        )
        self._restore(self._scheduler)
        counts = inputs.train.counts
        print_rank_0(f"sparse balance: {counts.describe()}")
        self.monitor = StepMonitor(
            args,
            scheduler=self._scheduler,
            recorder=self._recorder(),
            reducer=StepReducer(
                inputs.job,
                self._place,
                buckets=self._coverage.buckets,
                grid_size=len(inputs.grid),
                group=None,
                device=self._device,
            ),
            lost_tokens={
                "truncated-tokens": counts.truncated_tokens,
                "dropped-tokens": counts.dropped_tokens,
            },
            pad_to_multiple_of=self._pad_to_multiple_of,
            device=self._device,
            log=self._open_log(),
        )
        return self._scheduler

    def _restore(self, scheduler: Scheduler) -> None:
        saved = saved_arguments(self._args)
        if saved is None:
            return
        state = getattr(saved, STATE_ATTRIBUTE, None)
        if state is None:
            print_rank_0(
                f"sparse balance: the checkpoint in {self._args.load} has no plugin state; "
                "coverage curves and cost corrections start afresh"
            )
            return
        scheduler.load_state_dict(state)
        setattr(self._args, STATE_ATTRIBUTE, state)

    def _recorder(self) -> MicroBatchRecorder:
        job = self._inputs.job
        return MicroBatchRecorder(
            HostClock() if self._device.type == "cpu" else CudaEventClock(),
            virtual_stages=job.virtual_stages,
            micro_batches=job.micro_batches,
            backward_order=_backward_order(job, self._place.pipeline_rank),
        )

    def _open_log(self) -> StepLog | None:
        directory = self._inputs.config.log_dir
        if directory is None or self._place.world_rank != 0:
            return None
        log = StepLog(directory)
        log.begin_run(_run_header(self._inputs, self._args), resumed=self._args.iteration > 0)
        return log

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
        stage, job = self._place.pipeline_rank, self._inputs.job
        embeds = (stage, chunk) == (0, 0)
        computes_loss = (stage, chunk) == (job.pipeline_stages - 1, job.virtual_stages - 1)
        return MicroBatchIterator(
            schedule,
            index,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            reads_tokens=embeds or computes_loss,
            training=training,
            consumed_samples=consumed,
            global_batch_size=batch_size,
            pad_to_multiple_of=self._pad_to_multiple_of,
        )

    def _evaluation_iterator(
        self, index: SampleIndex, consumed: int, vp_stage: int | None
    ) -> MicroBatchIterator:
        args, job = self._args, self._inputs.job
        batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        micro_batch_size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        micro_batches = batch_size // (micro_batch_size * job.data_parallel_size)
        schedule = EvaluationSchedule(
            job=replace(job, micro_batches=micro_batches),
            policy=self._inputs.policy,
            cost=self._inputs.cost,
            coverage=self._coverage,
            index=index,
            global_batch_size=batch_size,
        )
        return self._iterator(
            schedule, index, vp_stage, training=False, consumed=consumed, batch_size=batch_size
        )


def distributed_provider(session: Session) -> Callable[..., Any]:
    """The session's dataset provider, marked for Megatron as called on every rank."""

    def provide(sample_counts: Any, vp_stage: int | None = None) -> Any:
        return session.dataset_provider(sample_counts, vp_stage)

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def print_rank_0(message: str) -> None:
    """Print on the first rank of the default group only."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def _with_measured_cost(inputs: Inputs, args: Namespace) -> Inputs:
    """Inputs with a cost model, profiling now if the user left that to start-up."""
    if inputs.cost is not None:
        return inputs
    print_rank_0("sparse balance: measuring the model's layers on rank 0")
    table = shared_cost_table(sys.argv[1:], inputs.config.log_dir)
    return replace(inputs, cost=with_recompute(CostModel.fit(table), args))


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
