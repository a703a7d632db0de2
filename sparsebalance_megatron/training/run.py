# SPDX-License-Identifier: Apache-2.0
"""A training run that has started, on one rank: its scheduler, iterators and state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.data.sample_order import Samples
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import RankPlace
from sparsebalance_megatron.learn.scheduler import Scheduler, evaluation_scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.megatron.sequence_groups import make_sequence_groups
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_plan import JobShape
from sparsebalance_megatron.profiling.clocks import CudaEventClock, HostClock
from sparsebalance_megatron.training.data_iterator import MicroBatchIterator, Schedule
from sparsebalance_megatron.training.inputs import CostedInputs
from sparsebalance_megatron.training.row_reader import RowReader
from sparsebalance_megatron.training.rows import RowPacking
from sparsebalance_megatron.training.sinks import open_sinks
from sparsebalance_megatron.training.step_monitor import StepMonitor
from sparsebalance_megatron.training.step_reducer import StepReducer
from sparsebalance_megatron.training.timing import MicroBatchRecorder


class Run:
    """A started run on one rank; see :class:`.session.Session`, which makes it.

    Args:
        scheduler: plans its steps; it has taken over what state there is.
        record: of :func:`.resume.run_record`.
        resumed: whether logs go on from those of an earlier run.
        extra_steps: trained before, beyond what the samples consumed make at this batch size.
        device: where the model runs.
        after_step: called when a step has been learnt from, where its state may be kept.

    ``monitor`` observes its forward steps; ``packing`` says how their rows lie on ranks.
    """

    def __init__(
        self,
        inputs: CostedInputs,
        scheduler: Scheduler,
        *,
        record: Mapping[str, str],
        resumed: bool,
        extra_steps: int,
        device: torch.device,
        after_step: Callable[[], None],
    ) -> None:
        self._inputs = inputs
        self.scheduler = scheduler
        self.record = dict(record)
        self.extra_steps = extra_steps
        self._place = place = rank_place()
        settings, job = inputs.settings, inputs.job
        self.packing = RowPacking(
            block_size=inputs.config.block_size,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            groups=make_sequence_groups(
                inputs.policy.max_context_parallel,
                exchange=inputs.config.exchange,
                ranks_per_node=settings.neighbours_per_node,
                timeout_minutes=settings.distributed_timeout_minutes,
            )
            if inputs.policy.max_context_parallel > 1
            else None,
        )
        self.monitor = StepMonitor(
            inputs,
            after_step=after_step,
            extra_steps=extra_steps,
            scheduler=scheduler,
            recorder=MicroBatchRecorder(
                HostClock() if device.type == "cpu" else CudaEventClock(),
                virtual_stages=job.virtual_stages,
                backward_order=partial(backward_order, job, place.pipeline_rank),
            ),
            reducer=StepReducer(
                job,
                place,
                buckets=scheduler.coverage.buckets,
                grid_size=len(inputs.grid),
                group=None,
                device=device,
            ),
            device=device,
            packing=self.packing,
            sinks=open_sinks(inputs, place, scheduler.coverage, device, resumed=resumed),
        )

    def train_iterator(
        self, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """This rank's training micro-batches for one model chunk.

        Args:
            consumed_samples: trained on before; a step must begin there.
        """
        sizes = self._inputs.settings.batch_sizes
        step = sizes.step_at(consumed_samples)
        assert step is not None, "the session has checked it"
        return self._iterator(
            self.scheduler, self._inputs.train, vp_stage, training=True, step=step, sizes=sizes
        )

    def evaluation_iterator(
        self, index: Samples, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """Micro-batches of validation or test samples, at base budgets."""
        settings, job = self._inputs.settings, self._inputs.job
        batch_size = settings.eval_global_batch_size or settings.global_batch_size
        micro_batch_size = settings.eval_micro_batch_size or settings.micro_batch_size
        micro_batches = batch_size // (micro_batch_size * settings.data_parallel_size)
        schedule = evaluation_scheduler(
            job=replace(job, micro_batches=micro_batches),
            policy=self._inputs.policy,
            cost=self._inputs.cost,
            coverage=self.scheduler.coverage,
            index=index,
            global_batch_size=batch_size,
            dense=self._inputs.config.eval_attention == "dense",
            clock=time.perf_counter,
        )
        return self._iterator(
            schedule,
            index,
            vp_stage,
            training=False,
            step=consumed_samples // batch_size,
            sizes=BatchSizes.constant(batch_size),
        )

    def _iterator(
        self,
        schedule: Schedule,
        index: Samples,
        vp_stage: int | None,
        *,
        training: bool,
        step: int,
        sizes: BatchSizes,
    ) -> MicroBatchIterator:
        chunk = vp_stage or 0
        stage, job = self._place.pipeline_rank, self._inputs.job
        embeds = (stage, chunk) == (0, 0)
        computes_loss = (stage, chunk) == (job.pipeline_stages - 1, job.virtual_stages - 1)
        reader = None
        if embeds or computes_loss:
            reader = RowReader(
                index,
                data_parallel_rank=self._place.data_parallel_rank,
                packing=self.packing,
                worker=ThreadPoolExecutor(1, "sparse-balance-read"),
            )
        return MicroBatchIterator(
            schedule,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            reader=reader,
            training=training,
            step=step,
            batch_sizes=sizes,
            packing=self.packing,
        )


def make_scheduler(inputs: CostedInputs) -> Scheduler:
    """What plans a run, before it has observed anything."""
    config, sizes = inputs.config, inputs.settings.batch_sizes
    planner = StepPlanner(
        job=inputs.job,
        policy=inputs.policy,
        cost=inputs.cost,
        coverage=CoverageCurves(inputs.job.layers, inputs.grid[-1], config.coverage_decay),
        global_batch_size=sizes.largest,
        calibrate=config.calibration,
        clock=time.perf_counter,
    )
    return Scheduler(
        planner,
        job=inputs.job,
        index=inputs.train,
        batch_sizes=sizes,
        worker=ThreadPoolExecutor(1, "sparse-balance-plan") if config.planning == "ahead" else None,
    )


def rank_place() -> RankPlace:
    """Where this rank stands; once Megatron's groups exist."""
    return RankPlace(
        data_parallel_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        world_rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def backward_order(job: JobShape, stage: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of every backward of a pipeline stage, in the schedule's order."""
    order = job.schedule(job.pipeline_stages, micro_batches, job.virtual_stages)
    return [
        (operation.chunk, operation.micro_batch)
        for operation in order.by_stage[stage]
        if operation.direction is Direction.BACKWARD
    ]
