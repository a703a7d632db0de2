# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank: plans, iterators and state, whoever owns the loop.

:class:`.inputs.Inputs` is what could be checked before a process group exists; :class:`Session`
adds what needs one. :mod:`.training_hooks` puts it into ``megatron.training``, :mod:`.own_loop`
into a trainer that calls Megatron's schedules itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import parallel_state

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.evaluation_schedule import EvaluationSchedule
from sparsebalance_megatron.plan.measurement import RankPlace
from sparsebalance_megatron.plan.scheduler import Scheduler, StateError
from sparsebalance_megatron.plan.schedules.orders import megatron_order
from sparsebalance_megatron.plan.step_plan import JobShape
from sparsebalance_megatron.profiling.clocks import CudaEventClock, HostClock
from sparsebalance_megatron.profiling.startup import shared_cost_table
from sparsebalance_megatron.training.agreement import check_ranks_agree
from sparsebalance_megatron.training.data_iterator import MicroBatchIterator, Schedule
from sparsebalance_megatron.training.inputs import Inputs, fingerprint, with_recompute
from sparsebalance_megatron.training.resume import compare_runs, run_record
from sparsebalance_megatron.training.row_reader import RowReader
from sparsebalance_megatron.training.sinks import StepOutputs, open_outputs
from sparsebalance_megatron.training.step_monitor import StepMonitor
from sparsebalance_megatron.training.step_reducer import StepReducer
from sparsebalance_megatron.training.timing import MicroBatchRecorder


class Session:
    """A run on one rank. ``scheduler`` and ``monitor`` exist once it has started.

    Args:
        device: where the model runs.
        after_step: called when a step has been learnt from, where :meth:`state_dict` may be kept.
    """

    scheduler: Scheduler
    monitor: StepMonitor

    def __init__(
        self, inputs: Inputs, device: torch.device, after_step: Callable[[], None] = lambda: None
    ) -> None:
        self.inputs = inputs
        self.device = device
        self._after_step = after_step
        self._started = False
        self._loaded_state: dict[str, Any] | None = None

    def train_iterator(
        self, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """This rank's training micro-batches for one model chunk; starts the session if need be.

        Args:
            consumed_samples: trained on before, a multiple of the global batch size.

        Raises:
            StateError, CostTableError, RankDisagreementError: at the start, on all ranks alike.
        """
        batch_size = self.inputs.settings.global_batch_size
        if consumed_samples % batch_size:
            raise StateError(
                f"the checkpoint has consumed {consumed_samples} samples, no multiple of "
                f"--global-batch-size {batch_size}; resume with another global batch size"
            )
        self._start(resumed=consumed_samples > 0)
        return self._iterator(
            self.scheduler,
            self.inputs.train,
            vp_stage,
            training=True,
            consumed=consumed_samples,
            batch_size=batch_size,
        )

    def evaluation_iterator(
        self, index: SampleIndex, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """Micro-batches of validation or test samples, at base budgets; the session has started."""
        settings, job = self.inputs.settings, self.inputs.job
        batch_size = settings.eval_global_batch_size or settings.global_batch_size
        micro_batch_size = settings.eval_micro_batch_size or settings.micro_batch_size
        micro_batches = batch_size // (micro_batch_size * job.data_parallel_size)
        schedule = EvaluationSchedule(
            job=replace(job, micro_batches=micro_batches),
            policy=self.inputs.policy,
            cost=self.inputs.cost,
            coverage=self.scheduler.coverage,
            index=index,
            global_batch_size=batch_size,
            dense=self.inputs.config.eval_attention == "dense",
        )
        return self._iterator(
            schedule,
            index,
            vp_stage,
            training=False,
            consumed=consumed_samples,
            batch_size=batch_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the number of consumed samples; plain Python types."""
        if self._started:
            return self.scheduler.state_dict() | {"run": self._record}
        if self._loaded_state is None:
            raise StateError("nothing to save: the training iterator has not been asked for yet")
        return self._loaded_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of an earlier run, on every rank the same, before iterators exist.

        Raises:
            StateError: here or at the start, if it does not fit this model and layout.
        """
        self._loaded_state = state
        if self._started:
            self._take_over(state)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Go on from loaded state, and say what differs from the run that wrote it."""
        differences = compare_runs(state.get("run", self._record), self._record)
        for note in (*differences, *self.scheduler.load_state_dict(state)):
            print_rank_0(f"sparse balance: resumed: {note}")

    def make_scheduler(self, coverage: CoverageCurves) -> Scheduler:
        """What plans this run; the place to put another scheduler."""
        inputs = self.inputs
        return Scheduler(
            job=inputs.job,
            policy=inputs.policy,
            cost=inputs.cost,
            coverage=coverage,
            index=inputs.train,
            global_batch_size=inputs.settings.global_batch_size,
            window=inputs.config.window,
            calibrate=inputs.config.calibration,
            clock=time.perf_counter,
            worker=ThreadPoolExecutor(1, "sparse-balance-plan")
            if inputs.config.planning == "ahead"
            else None,
        )

    def _start(self, *, resumed: bool) -> None:
        """Build what needs process groups, once; collective over all ranks."""
        if self._started:
            return
        inputs = self.inputs = _with_measured_cost(self.inputs)
        check_ranks_agree(fingerprint(inputs))
        self._record = run_record(inputs)
        self._place = _rank_place()
        coverage = CoverageCurves(inputs.job.layers, inputs.grid[-1], inputs.config.coverage_decay)
        self.scheduler = self.make_scheduler(coverage)
        if self._loaded_state is not None:
            self._take_over(self._loaded_state)
        elif resumed:
            print_rank_0(
                "sparse balance: the checkpoint has no plugin state; coverage curves and cost "
                "corrections start afresh"
            )
        counts = inputs.train.counts
        print_rank_0(f"sparse balance: {counts.describe()}")
        self.monitor = StepMonitor(
            after_step=self._after_step,
            scheduler=self.scheduler,
            recorder=self._recorder(),
            reducer=StepReducer(
                inputs.job,
                self._place,
                buckets=coverage.buckets,
                grid_size=len(inputs.grid),
                group=None,
                device=self.device,
            ),
            lost_tokens={
                "truncated-tokens": counts.truncated_tokens,
                "dropped-tokens": counts.dropped_tokens,
            },
            pad_to_multiple_of=inputs.settings.pad_to_multiple_of,
            device=self.device,
            outputs=self._open_log(resumed=resumed),
        )
        self._started = True

    def _recorder(self) -> MicroBatchRecorder:
        job = self.inputs.job
        return MicroBatchRecorder(
            HostClock() if self.device.type == "cpu" else CudaEventClock(),
            virtual_stages=job.virtual_stages,
            micro_batches=job.micro_batches,
            backward_order=_backward_order(job, self._place.pipeline_rank),
        )

    def _open_log(self, *, resumed: bool) -> StepOutputs:
        return open_outputs(
            self.inputs,
            self._place,
            self.scheduler.coverage,
            self.device,
            header=_run_header(self.inputs),
            resumed=resumed,
        )

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
        stage, job = self._place.pipeline_rank, self.inputs.job
        embeds = (stage, chunk) == (0, 0)
        computes_loss = (stage, chunk) == (job.pipeline_stages - 1, job.virtual_stages - 1)
        reader = None
        if embeds or computes_loss:
            reader = RowReader(
                index,
                data_parallel_rank=self._place.data_parallel_rank,
                pad_to_multiple_of=self.inputs.settings.pad_to_multiple_of,
                worker=ThreadPoolExecutor(1, "sparse-balance-read"),
            )
        return MicroBatchIterator(
            schedule,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            reader=reader,
            training=training,
            consumed_samples=consumed,
            global_batch_size=batch_size,
            pad_to_multiple_of=self.inputs.settings.pad_to_multiple_of,
        )


def print_rank_0(message: str) -> None:
    """Print on the first rank of the default group only."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def _with_measured_cost(inputs: Inputs) -> Inputs:
    """Inputs with a cost model, profiling now if the user left that to start-up."""
    if inputs.cost is not None:
        return inputs
    print_rank_0("sparse balance: measuring the model's layers on rank 0")
    table = shared_cost_table(inputs.settings.command_line or (), inputs.config.log_dir)
    return replace(inputs, cost=with_recompute(CostModel.fit(table), inputs.settings))


def _run_header(inputs: Inputs) -> dict[str, Any]:
    return {
        "config": asdict(inputs.config),
        "cost_source": inputs.cost.source,
        "data_parallel_size": inputs.job.data_parallel_size,
        "pipeline_stages": inputs.job.pipeline_stages,
        "virtual_stages": inputs.job.virtual_stages,
        "micro_batches": inputs.job.micro_batches,
        "layers": inputs.job.layers,
        "global_batch_size": inputs.settings.global_batch_size,
        "seq_length": inputs.settings.seq_length,
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
    order = megatron_order(job.pipeline_stages, job.micro_batches, job.virtual_stages)
    return [
        (operation.chunk, operation.micro_batch)
        for operation in order.by_stage[stage]
        if operation.direction is Direction.BACKWARD
    ]
