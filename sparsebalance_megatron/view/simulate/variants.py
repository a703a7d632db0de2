# SPDX-License-Identifier: Apache-2.0
"""Named setups, and global batches planned in several ways: what each is predicted to take.

The paper is arXiv:2604.13847; of the setups two are its own.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.config import (
    Batching,
    ContextParallel,
    CoverageTarget,
    SparseBalanceConfig,
    Tuning,
)
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.prediction import Workload, prior_coverage
from sparsebalance_megatron.plan.bounds.step_bounds import step_bounds
from sparsebalance_megatron.plan.budgets.problem import feasible_range
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import PlanPolicy, StepPlan
from sparsebalance_megatron.view.simulate.lengths import GENERATORS, MAX_TOKENS, batches_of
from sparsebalance_megatron.view.simulate.models import MODELS, ModelPreset, counted_cost

RANKS_PER_NODE = 8


class Setup(NamedTuple):
    """A job on generated lengths. Sizes count ranks, stages and samples."""

    data: tuple[str, ...]
    data_parallel_size: int
    pipeline_stages: int
    tensor_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    model: str = "qwen2.5-3b"

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)


SETUPS: Mapping[str, Setup] = {
    "paper-main": Setup(("longalign", "chatqa2", "chatqa2-tail"), 4, 4, 2, 1, 16),
    "paper-ablation": Setup(("chatqa2", "chatqa2-tail"), 2, 4, 1, 2, 16),
    "scale-1024": Setup(("longalign",), 64, 4, 4, 1, 512),
    "scale-10240": Setup(("longalign",), 640, 4, 4, 1, 20480),
    "packed": Setup(("prolong",), 8, 4, 1, 4, 512),
}
"""Fields in the order of :class:`Setup`."""


def shared_job(context_parallel_size: int, *, micro_batches: int, **sizes: int) -> Job:
    """A job whose layers are split evenly; sharing leaves each of its ranks more positions.

    Args:
        micro_batches: positions of a rank where none share.
        sizes: see :meth:`.Job.even`.
    """
    job = Job.even(micro_batches=micro_batches * context_parallel_size, **sizes)
    return replace(job, context_parallel_size=context_parallel_size)


def workload(
    batches: tuple[tuple[int, ...], ...],
    *,
    job: Job,
    config: SparseBalanceConfig,
    cap_tokens: int,
    max_cp_size: int,
    cost: CostModel,
    longest_tokens: int,
) -> Workload:
    """Global batches under a configuration's policy, with the prior of coverage.

    Args:
        cap_tokens: of a micro-batch on one rank.
        longest_tokens: the longest sample that coverage is known of.
    """
    return Workload(
        batches=batches,
        job=job,
        policy=PlanPolicy.from_config(config, cap_tokens, max_cp_size),
        cost=cost,
        coverage=prior_coverage(job.layers, max(1, -(-longest_tokens // cost.block_size))),
    )


def workload_of(
    setup: Setup,
    data: str | np.ndarray,
    *,
    steps: int,
    seed: int,
    config: SparseBalanceConfig,
    model: ModelPreset | None = None,
    context_parallel_size: int = 1,
    max_cp_size: int = 1,
) -> Workload:
    """``steps`` global batches in order.

    Args:
        data: the name of a distribution to draw lengths from, or lengths in tokens.
        model: in place of the setup's.
    """
    model = model or MODELS[setup.model]
    samples = steps * setup.global_batch_size
    lengths = GENERATORS[data](samples, seed) if isinstance(data, str) else data
    longest = max(MAX_TOKENS, int(lengths[:samples].max()))
    cost = counted_cost(
        model,
        block_size=config.block_size,
        tensor_parallel_size=setup.tensor_parallel_size,
        device=config.counted_device,
        gigabytes_per_second=config.gigabytes_per_second,
    )
    return workload(
        batches_of(lengths, setup.global_batch_size, steps),
        job=shared_job(
            context_parallel_size,
            layers=model.layers,
            ranks=setup.data_parallel_size,
            stages=setup.pipeline_stages,
            micro_batches=setup.micro_batches,
        ),
        config=config,
        cap_tokens=setup.micro_batch_size * longest,
        max_cp_size=max_cp_size,
        cost=cost,
        longest_tokens=longest,
    )


class Variant(NamedTuple):
    """One way to plan.

    ``context_parallel``: None leaves the ranks of the job apart, whatever its context-parallel
    size. ``segments``: whether micro-batches may pass the pipeline in segments.
    """

    batching: Batching
    tuning: Tuning
    coverage_target: CoverageTarget = "threshold"
    context_parallel: ContextParallel | None = None
    segments: bool = False

    def of(self, workload: Workload) -> Workload:
        """The workload, planned this way."""
        job = workload.job if self.context_parallel else _apart(workload.job)
        dynamic = self.context_parallel == "dynamic"
        policy = replace(
            workload.policy,
            batching=self.batching,
            tuning=self.tuning,
            coverage_target=self.coverage_target,
            context_parallel=self.context_parallel or "static",
            max_context_parallel=workload.policy.max_context_parallel if dynamic else 1,
            max_segments=workload.policy.max_segments if self.segments else 1,
        )
        return replace(workload, job=job, policy=policy)


def _apart(job: Job) -> Job:
    """The job whose ranks share no micro-batch."""
    micro_batches = job.micro_batches // job.context_parallel_size
    return replace(job, context_parallel_size=1, micro_batches=micro_batches)


BASELINE = "baseline"
OURS = "ours"
ALL_ROWS: Mapping[str, Variant] = {
    BASELINE: Variant("arrival", "off"),
    "+DST": Variant("arrival", "anchor"),
    "+SAB": Variant("latency", "off"),
    "+LBB": Variant("length", "off"),
    "LBB+DST": Variant("length", "anchor"),
    "SAB+DST": Variant("latency", "anchor"),
    OURS: Variant("makespan", "makespan"),
    "ours, base coverage": Variant("makespan", "makespan", "base"),
}
"""The rows of the paper's ablation table, then this package's."""

SHARED_ROWS: Mapping[str, Variant] = {
    "baseline-cp": Variant("arrival", "off", "threshold", "static"),
    "ours-static-cp": Variant("makespan", "makespan", "base", "static"),
    "ours-dynamic-cp": Variant("makespan", "makespan", "base", "dynamic"),
}
"""Rows whose micro-batches several ranks share: not planned, planned with the context-parallel size
for all, and with a planned cp_size for each."""

SEGMENTED_ROWS: Mapping[str, Variant] = {
    "ours-segments": Variant("makespan", "makespan", "base", segments=True)
}
"""Rows whose micro-batches may pass the pipeline in segments."""


ROWS_HELP = (
    "baseline keeps the order of arrival and fixed budgets; DST tunes budgets towards an anchor "
    "latency, SAB places samples by latency, LBB by length (the paper's terms); ours searches for "
    "the least makespan with budgets tuned to it, with base coverage held at that of fixed "
    "budgets; -cp rows let ranks share micro-batches; with -segments they pass the pipeline in "
    "pieces."
)


def variants_of(workload: Workload) -> dict[str, Variant]:
    """All rows that the workload's context-parallel sizes and segments allow."""
    shared = dict(SHARED_ROWS)
    if workload.job.context_parallel_size == 1:
        del shared["baseline-cp"], shared["ours-static-cp"]
    if workload.policy.max_context_parallel == 1:
        del shared["ours-dynamic-cp"]
    segmented = SEGMENTED_ROWS if workload.policy.max_segments > 1 else {}
    return {**ALL_ROWS, **shared, **segmented}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant over all steps; means unless said otherwise, imbalances are max/mean.

    ``makespan_ms``: of a step. ``speedup``: the baseline's total time over this variant's;
    ``speedup_least``: in the worst single step. ``bound_ratio``: step time over
    the lower bound of the same samples; ``bound_ratio_hideable``: over the steps that hold no
    unhideable sample. ``coverage_min_drop``: the largest loss of any sample and layer against its
    base budget. ``work_ratio``: work over that at base budgets. ``plan_ms``: median.
    """

    makespan_ms: float
    speedup: float
    speedup_least: float
    bound_ratio: float
    bound_ratio_hideable: float | None
    imbalance_microbatch: float
    imbalance_rank: float
    coverage_mean: float | None
    coverage_min_drop: float
    work_ratio: float
    plan_ms: float
    step_ms: tuple[float, ...]


def evaluate(
    workload: Workload, variants: Mapping[str, Variant], clock: Callable[[], float]
) -> dict[str, Outcome]:
    """Every variant's outcome on the same samples; the first variant is the baseline.

    Args:
        clock: seconds, for the time that planning takes.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    unhideable = [_unhideable(workload, batch) for batch in workload.batches]
    outcomes: dict[str, Outcome] = {}
    for name, variant in variants.items():
        steps = list(variant.of(workload).planned_steps(clock))
        baseline = next(iter(outcomes.values())) if outcomes else None
        outcomes[name] = _outcome(workload, steps, unhideable, baseline)
    return outcomes


def unhideable_steps(workload: Workload) -> int:
    """Steps with a sample that no placement hides, at the least budgets the policy allows."""
    return sum(_unhideable(workload, batch) for batch in workload.batches)


def _outcome(
    workload: Workload,
    steps: Sequence[PlannedStep],
    unhideable: Sequence[bool],
    baseline: Outcome | None,
) -> Outcome:
    expected = [step.plan.expectation for step in steps]
    step_ms = np.array([each.makespan_ms for each in expected])
    baseline_ms = step_ms if baseline is None else np.array(baseline.step_ms)
    ratios = step_ms / [each.lower_bound_ms for each in expected]
    hideable = ~np.array(unhideable)
    coverage = [each.coverage_mean for each in expected if each.coverage_mean is not None]
    return Outcome(
        makespan_ms=float(step_ms.mean()),
        speedup=float(baseline_ms.sum() / step_ms.sum()),
        speedup_least=float((baseline_ms / step_ms).min()),
        bound_ratio=float(ratios.mean()),
        bound_ratio_hideable=float(ratios[hideable].mean()) if hideable.any() else None,
        imbalance_microbatch=float(np.mean([each.imbalance_micro_batches for each in expected])),
        imbalance_rank=float(np.mean([each.imbalance_rank_sums for each in expected])),
        coverage_mean=float(np.mean(coverage)) if coverage else None,
        coverage_min_drop=max(_largest_drop(workload, step.plan) for step in steps),
        work_ratio=float(np.mean([each.work_ratio for each in expected])),
        plan_ms=float(np.median([step.plan_ms for step in steps])),
        step_ms=tuple(step_ms.tolist()),
    )


def _unhideable(workload: Workload, batch: tuple[int, ...]) -> bool:
    job = _apart(workload.job)
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(batch, job, workload.cost, scales, workload.policy.dense_L(job.layers))
    floor_LS = feasible_range(costs, workload.coverage, workload.policy).floor_LS
    bounds = step_bounds(costs.sample_ms(floor_LS), costs)
    return bool(bounds.unhideable_S.any())


def _largest_drop(workload: Workload, plan: StepPlan) -> float:
    lengths_S = np.concatenate([each.lengths_tokens for each in plan.micro_batches])
    blocks_S = -(-lengths_S // workload.policy.block_size)
    budgets_LS = np.concatenate([each.budgets_LS for each in plan.micro_batches], axis=1)
    base_LS = np.broadcast_to(workload.policy.base_L(len(budgets_LS))[:, None], budgets_LS.shape)
    drop_LS = workload.coverage.coverage_LS(blocks_S, base_LS) - workload.coverage.coverage_LS(
        blocks_S, budgets_LS
    )
    return max(0.0, float(np.nan_to_num(drop_LS).max()))
