# SPDX-License-Identifier: Apache-2.0
"""What workloads are predicted to take. Everything that predicts gets its numbers here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.cost.memory import StageMemory
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.cost.work_model import features
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.budgets.problem import feasible_range
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.predict.memory import memory_at_most, memory_of_steps
from sparsebalance_megatron.predict.workload import Workload

Watch = Callable[[], object]
"""Called after each planned step, to show how far a prediction is."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A workload over all its steps; means unless said otherwise, imbalances are max/mean.

    Attributes:
        makespan_ms: of a step.
        speedup: the baseline's total time over this one's; 1 without a baseline.
        bound_ratio: step time over the lower bound of the same samples.
        coverage_mean: by the prior; None where nothing is known.
        work_ratio: work over that at base budgets.
        plan_ms: median.
        tokens_per_second_per_gpu: of all steps.
        bubble_share: of the GPUs' time within a step, what no micro-batch fills.
        router_share: of the compute time, what selecting blocks takes.
        dense_tokens_share: of tokens in documents that layers at the base budget attend to densely.
        stages: memory of every pipeline stage in the step that needs most of it.
        stages_at_most: likewise, with every micro-batch at the token cap.
    """

    makespan_ms: float
    speedup: float
    bound_ratio: float
    imbalance_microbatch: float
    imbalance_rank: float
    coverage_mean: float | None
    work_ratio: float
    plan_ms: float
    step_ms: tuple[float, ...]
    tokens_per_second_per_gpu: float
    bubble_share: float
    router_share: float
    dense_tokens_share: float
    stages: tuple[StageMemory, ...]
    stages_at_most: tuple[StageMemory, ...]


def predict(
    workload: Workload,
    *,
    baseline: Outcome | None = None,
    clock: Callable[[], float] = time.perf_counter,
    watch: Watch = lambda: None,
) -> Outcome:
    """Plan all steps and sum them up.

    Args:
        clock: seconds, for the time that planning takes.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    steps = []
    for step in workload.planned_steps(clock):
        steps.append(step)
        watch()
    plans, job = [step.plan for step in steps], workload.job
    expected = [plan.expectation for plan in plans]
    step_ms = np.array([each.makespan_ms for each in expected])
    baseline_ms = step_ms if baseline is None else np.array(baseline.step_ms)
    ratios = step_ms / [each.lower_bound_ms for each in expected]
    coverage = [each.coverage_mean for each in expected if each.coverage_mean is not None]
    busy_ms = sum(float(each.times_2RPVM.sum()) for each in expected)
    lengths = np.concatenate(workload.batches)
    dense_S = replace(workload.plan_settings, layer_budgets=None).dense_LS(1, lengths)[0]
    return Outcome(
        makespan_ms=float(step_ms.mean()),
        speedup=float(baseline_ms.sum() / step_ms.sum()),
        bound_ratio=float(ratios.mean()),
        imbalance_microbatch=float(np.mean([each.imbalance_micro_batches for each in expected])),
        imbalance_rank=float(np.mean([each.imbalance_rank_sums for each in expected])),
        coverage_mean=float(np.mean(coverage)) if coverage else None,
        work_ratio=float(np.mean([each.work_ratio for each in expected])),
        plan_ms=float(np.median([step.plan_ms for step in steps])),
        step_ms=tuple(step_ms.tolist()),
        tokens_per_second_per_gpu=float(lengths.sum() / (step_ms.sum() / 1e3) / workload.gpus),
        # Rounding may leave less than nothing where all are busy.
        bubble_share=max(
            0.0,
            1.0 - busy_ms / (job.data_parallel_size * job.pipeline_stages * float(step_ms.sum())),
        ),
        router_share=sum(_router_ms(workload, plan) for plan in plans) / busy_ms,
        dense_tokens_share=float(lengths[dense_S].sum() / lengths.sum()),
        stages=memory_of_steps(workload, plans),
        stages_at_most=memory_at_most(workload),
    )


def unhideable_steps(workload: Workload) -> int:
    """Steps with a sample that no placement hides, at the least budgets the policy allows."""
    return sum(_unhideable(workload, batch) for batch in workload.batches)


def _unhideable(workload: Workload, batch: tuple[int, ...]) -> bool:
    job = replace(workload.job, context_parallel_size=1)
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    dense_LS = workload.plan_settings.dense_LS(job.layers, batch)
    costs = step_costs(batch, job, workload.cost, scales, dense_LS)
    floor_LS = feasible_range(costs, workload.coverage, workload.plan_settings).floor_LS
    settings = workload.plan_settings
    shared_by = workload.job.context_parallel_size
    if settings.context_parallel == "dynamic":
        shared_by = max(shared_by, settings.max_context_parallel)
    bounds = step_bounds(costs.sample_ms(floor_LS), costs, shared_by)
    return bool(bounds.unhideable_S.any())


def _router_ms(workload: Workload, plan: StepPlan) -> float:
    """Selecting blocks, forward and backward, on all ranks and layers of a step."""
    cost, found_ms = workload.cost, 0.0
    both = sum(cost.coefficients_ms(Part.ROUTER, each) for each in Direction)
    for lengths in (np.array(each.lengths_tokens) for each in plan.micro_batches):
        for dense_S in workload.plan_settings.dense_LS(workload.job.layers, lengths):
            if not dense_S.all():
                found_ms += float(both @ features(lengths[~dense_S], 1, cost.block_size, cost.work))
    return found_ms
