# SPDX-License-Identifier: Apache-2.0
"""Samples of a run that reads its own data: what plans their steps, and iterators over them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import RankPlace
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler, evaluation_scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.inputs import Inputs
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator, Schedule, SequencePacking


class DataSamples:
    """The micro-batches of one rank of a started run, for training and for evaluation.

    ``scheduler`` has taken over what state there is; ``packing`` says how micro-batches lie on
    ranks.
    """

    def __init__(self, inputs: Inputs, scheduler: Scheduler, place: RankPlace) -> None:
        self._inputs = inputs
        self.scheduler = scheduler
        self._place = place
        settings = inputs.settings
        self.packing = SequencePacking.of_run(
            inputs.config,
            largest_cp_size=inputs.policy.max_context_parallel,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            neighbours_per_node=settings.neighbours_per_node,
            timeout_minutes=settings.distributed_timeout_minutes,
        )

    def token_counts(self, plan: StepPlan) -> dict[str, int]:
        """Tokens that a step's plan pads, over all ranks, and those that the data set lost."""
        counts = self._inputs.train.counts
        return {
            "padded-tokens": sum(map(self.packing.padded_tokens, plan.micro_batches)),
            "truncated-tokens": counts.truncated_tokens,
            "dropped-tokens": counts.dropped_tokens,
        }

    def train_iterator(
        self, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """This rank's training micro-batches for one model chunk, from the beginning of a step."""
        sizes = self._inputs.settings.batch_sizes
        step = sizes.step_at(consumed_samples)
        assert step is not None, "the session has checked it"
        return self._iterator(
            self.scheduler,
            self._inputs.train,
            vp_stage,
            training=True,
            step=step,
            batch_sizes=sizes,
        )

    def evaluation_iterator(
        self, index: SampleIndex, vp_stage: int | None = None, *, consumed_samples: int
    ) -> MicroBatchIterator:
        """Micro-batches of validation or test samples, at base budgets."""
        batch_size = evaluation_batch_size(self._inputs)
        return self._iterator(
            make_evaluation_scheduler(self._inputs, index, self.scheduler.coverage),
            index,
            vp_stage,
            training=False,
            step=consumed_samples // batch_size,
            batch_sizes=BatchSizes.constant(batch_size),
        )

    def _iterator(
        self, schedule: Schedule, index: SampleIndex, vp_stage: int | None, **others: Any
    ) -> MicroBatchIterator:
        job, chunk = self._inputs.job, vp_stage or 0
        last = job.pipeline_stages - 1, job.virtual_stages - 1
        reads = (self._place.pipeline_rank, chunk) in ((0, 0), last)
        return MicroBatchIterator(
            schedule,
            index if reads else None,
            self.packing,
            data_parallel_rank=self._place.data_parallel_rank,
            chunk=chunk,
            worker=ThreadPoolExecutor(1, "sparse-balance-read"),
            **others,
        )


def make_scheduler(inputs: Inputs) -> Scheduler:
    """Make the scheduler of a run that has observed nothing yet."""
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


def evaluation_batch_size(inputs: Inputs) -> int:
    """Samples of an evaluation step."""
    return inputs.settings.eval_global_batch_size or inputs.settings.global_batch_size


def make_evaluation_scheduler(
    inputs: Inputs, index: SampleIndex, coverage: CoverageCurves
) -> Scheduler:
    """Make the scheduler of evaluation, with the coverage curves of the training run."""
    settings, batch_size = inputs.settings, evaluation_batch_size(inputs)
    micro_batch_size = settings.eval_micro_batch_size or settings.micro_batch_size
    micro_batches = batch_size // (micro_batch_size * settings.data_parallel_size)
    return evaluation_scheduler(
        job=replace(inputs.job, micro_batches=micro_batches),
        policy=inputs.policy,
        cost=inputs.cost,
        coverage=coverage,
        index=index,
        global_batch_size=batch_size,
        dense=inputs.config.eval_attention == "dense",
        clock=time.perf_counter,
    )


def largest_evaluation_step(
    inputs: Inputs, index: SampleIndex, coverage: CoverageCurves
) -> PlannedStep:
    """The plan of the evaluation step with most tokens, among those of an epoch."""
    batch_size = evaluation_batch_size(inputs)
    steps = -(-index.counts.samples // batch_size)
    lengths = index.lengths_of(index.global_batch(0, steps * batch_size))
    largest = int(np.reshape(lengths, (steps, batch_size)).sum(axis=1).argmax())
    return make_evaluation_scheduler(inputs, index, coverage).planned(largest)
