# SPDX-License-Identifier: Apache-2.0
"""What plans the steps of a run that reads its own data: training, and evaluation."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler, evaluation_scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.run.inputs import Inputs


def make_scheduler(inputs: Inputs) -> Scheduler:
    """Make the scheduler of a run that has observed nothing yet."""
    config, sizes = inputs.config, inputs.settings.batch_sizes
    planner = StepPlanner(
        job=inputs.job,
        policy=inputs.policy,
        cost=inputs.cost,
        coverage=inputs.settings.host_job.coverage(config),
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
