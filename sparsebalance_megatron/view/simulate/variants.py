# SPDX-License-Identifier: Apache-2.0
"""Global batches planned in several ways, and what each is predicted to take.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.config import Batching, ContextParallel, CoverageTarget, Tuning
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.budgets.problem import feasible_range
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job, check_cp_sizes, default_max_cp_size
from sparsebalance_megatron.plan.pipeline.step_bounds import step_bounds
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import Expectation, PlanPolicy, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to plan.

    ``context_parallel``: None leaves the ranks of the job apart, whatever its context-parallel
    size.
    """

    batching: Batching
    tuning: Tuning
    coverage_target: CoverageTarget = "threshold"
    context_parallel: ContextParallel | None = None


RANKS_PER_NODE = 8
BASELINE = "baseline"
OURS = "ours"
ALL_ROWS: Mapping[str, Variant] = {
    BASELINE: Variant(batching="arrival", tuning="off"),
    "+DST": Variant(batching="arrival", tuning="anchor"),
    "+SAB": Variant(batching="latency", tuning="off"),
    "+LBB": Variant(batching="length", tuning="off"),
    "LBB+DST": Variant(batching="length", tuning="anchor"),
    "SAB+DST": Variant(batching="latency", tuning="anchor"),
    OURS: Variant(batching="makespan", tuning="makespan"),
    "ours, base coverage": Variant(batching="makespan", tuning="makespan", coverage_target="base"),
}
"""The rows of the paper's ablation table, then this package's."""

SHARED_ROWS: Mapping[str, Variant] = {
    "baseline-cp": Variant(batching="arrival", tuning="off", context_parallel="static"),
    "ours-static-cp": Variant(
        batching="makespan", tuning="makespan", coverage_target="base", context_parallel="static"
    ),
    "ours-dynamic-cp": Variant(
        batching="makespan", tuning="makespan", coverage_target="base", context_parallel="dynamic"
    ),
}
"""Rows whose micro-batches several ranks share: not planned, planned with the context-parallel size
for all, and with a planned cp_size for each."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How many ranks may share a micro-batch.

    ``context_parallel_size``: where all do, which also fixes the positions of a rank.
    ``max_context_parallel``: the largest planned cp_size.
    """

    context_parallel_size: int = 1
    max_context_parallel: int = 1

    @classmethod
    def of(
        cls, ranks: int, context_parallel_size: int, max_context_parallel: int | None
    ) -> Sharing:
        """The sharing that a user asks for.

        Args:
            ranks: data-parallel times context-parallel.
            max_context_parallel: None for 8 ranks at most, or none to share where the
                context-parallel size is 1.

        Raises:
            ConfigError: a size is no power of two that divides the ranks, or the largest
                cp_size is below the context-parallel size.
        """
        largest = max_context_parallel
        if largest is None:
            largest = default_max_cp_size(ranks, context_parallel_size, RANKS_PER_NODE)
        check_cp_sizes(ranks, context_parallel_size, largest, limit="--max-context-parallel")
        return cls(context_parallel_size=context_parallel_size, max_context_parallel=largest)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is planned: global batches in order, on a job with its costs and coverage."""

    batches: tuple[tuple[int, ...], ...]
    job: Job
    policy: PlanPolicy
    cost: CostModel
    coverage: CoverageCurves
    sharing: Sharing = Sharing()

    def plan(self, batch: tuple[int, ...]) -> StepPlan:
        """A step's plan under the workload's own policy, with nothing learnt before it."""
        scales = StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages)
        inputs = PlanInputs(
            lengths_tokens=batch,
            job=self.job,
            policy=self.policy,
            cost=self.cost,
            scales=scales,
            coverage=self.coverage,
        )
        return plan_step(0, inputs)

    def job_of(self, variant: Variant) -> Job:
        """The job as the variant cuts it up: sharing leaves each rank more positions."""
        if variant.context_parallel is None:
            return self.job
        size = self.sharing.context_parallel_size
        return replace(
            self.job, context_parallel_size=size, micro_batches=self.job.micro_batches * size
        )

    def policy_of(self, variant: Variant) -> PlanPolicy:
        """The policy with the variant's choices."""
        dynamic = variant.context_parallel == "dynamic"
        return replace(
            self.policy,
            batching=variant.batching,
            tuning=variant.tuning,
            coverage_target=variant.coverage_target,
            context_parallel="dynamic" if dynamic else "static",
            max_context_parallel=self.sharing.max_context_parallel if dynamic else 1,
        )

    def variants(self) -> dict[str, Variant]:
        """All rows that the sharing allows."""
        shared = dict(SHARED_ROWS)
        if self.sharing.context_parallel_size == 1:
            del shared["baseline-cp"], shared["ours-static-cp"]
        if self.sharing.max_context_parallel == 1:
            del shared["ours-dynamic-cp"]
        return {**ALL_ROWS, **shared}


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

    A :class:`~sparsebalance_megatron.learn.scheduler.Scheduler` plans each step when it begins, and
    learns that the step took what was predicted and reached the coverage that was expected.

    Args:
        clock: seconds, for the time that planning takes.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    outcomes: dict[str, Outcome] = {}
    for name, variant in variants.items():
        runs = _runs(workload, variant, clock)
        baseline = next(iter(outcomes.values())) if outcomes else None
        outcomes[name] = _outcome(runs, baseline)
    return outcomes


def unhideable_steps(workload: Workload) -> int:
    """Steps with a sample that no placement hides, at the least budgets the policy allows."""
    return sum(_unhideable(workload, batch) for batch in workload.batches)


@dataclass(frozen=True, kw_only=True)
class _Run:
    plan: StepPlan
    plan_ms: float
    largest_drop: float
    hideable: bool


def _runs(workload: Workload, variant: Variant, clock: Callable[[], float]) -> list[_Run]:
    order = _SampleOrder(workload.batches)
    job, batch_size = workload.job_of(variant), len(workload.batches[0])
    planner = StepPlanner(
        job=job,
        policy=workload.policy_of(variant),
        cost=workload.cost,
        coverage=copy.deepcopy(workload.coverage),
        global_batch_size=batch_size,
        calibrate="off",
        clock=clock,
    )
    sizes = BatchSizes.constant(batch_size)
    scheduler = Scheduler(planner, job=job, index=order, batch_sizes=sizes)
    runs = []
    for step in range(len(workload.batches)):
        planned = scheduler.planned(step)
        batch = tuple(order.lengths_of(planned.samples).tolist())
        scheduler.finish_step(step, _as_predicted(workload, batch, planned.plan.expectation))
        runs.append(
            _Run(
                plan=planned.plan,
                plan_ms=planned.plan_ms,
                largest_drop=_largest_drop(workload, planned.plan),
                hideable=not _unhideable(workload, batch),
            )
        )
    return runs


class _SampleOrder:
    """The samples of all batches, in order and then from the first again."""

    def __init__(self, batches: Sequence[tuple[int, ...]]) -> None:
        self._lengths_S = np.concatenate(batches)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size) % len(self._lengths_S)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return np.asarray(self._lengths_S[samples])


def _as_predicted(
    workload: Workload, batch: tuple[int, ...], expected: Expectation
) -> StepMeasurement:
    """The measurement of a step that went as expected.

    No coverage curve is among it (all ``counts_LU`` are 0), so the scheduler's curves stay those of
    the workload: what was only read off them is no new evidence for them.
    """
    curves = workload.coverage
    known = float(workload.job.layers * len(batch)) if expected.coverage_mean is not None else 0.0
    executed_mean = expected.coverage_mean or 0.0
    base_mean = _base_coverage(workload, batch) if known else 0.0
    tokens = float(sum(batch) * workload.job.layers) if known else 0.0
    return StepMeasurement(
        times_2RPVM=expected.times_2RPVM,
        schedule_ms=np.repeat(
            np.array(expected.rank_makespan_ms)[:, None], workload.job.pipeline_stages, axis=1
        ),
        coverage=CoverageTotals(
            sums_LUK=np.zeros_like(curves.mean_LUK),
            counts_LU=np.zeros(curves.observed_LU.shape),
            executed_L=np.full(workload.job.layers, executed_mean * len(batch)),
            executed_sum=executed_mean * known,
            base_sum=base_mean * known,
            count=known,
            minimum=expected.coverage_min or 0.0,
            grown=0.0,
            tokens=tokens,
            lost_tokens=(base_mean - executed_mean) * tokens,
        ),
        lm_loss=math.nan,
        tokens=sum(batch),
        differing_ranks=(),
    )


def _base_coverage(workload: Workload, batch: tuple[int, ...]) -> float:
    """Mean over the samples and layers whose curves are known."""
    blocks_S = -(-np.array(batch) // workload.policy.block_size)
    base_LS = np.full((workload.job.layers, len(batch)), workload.policy.base_budget)
    return float(np.nanmean(workload.coverage.coverage_LS(blocks_S, base_LS)))


def _outcome(runs: Sequence[_Run], baseline: Outcome | None) -> Outcome:
    expected = [run.plan.expectation for run in runs]
    step_ms = np.array([each.makespan_ms for each in expected])
    baseline_ms = step_ms if baseline is None else np.array(baseline.step_ms)
    ratios = step_ms / [each.lower_bound_ms for each in expected]
    hideable = np.array([run.hideable for run in runs])
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
        coverage_min_drop=max(run.largest_drop for run in runs),
        work_ratio=float(np.mean([each.work_ratio for each in expected])),
        plan_ms=float(np.median([run.plan_ms for run in runs])),
        step_ms=tuple(step_ms.tolist()),
    )


def _unhideable(workload: Workload, batch: tuple[int, ...]) -> bool:
    job = workload.job
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    costs = step_costs(batch, job, workload.cost, scales)
    floor_LS = feasible_range(costs, workload.coverage, workload.policy).floor_LS
    bounds = step_bounds(costs.sample_ms(floor_LS), costs)
    return bool(bounds.unhideable_S.any())


def _largest_drop(workload: Workload, plan: StepPlan) -> float:
    lengths_S = np.concatenate([each.lengths_tokens for each in plan.micro_batches])
    blocks_S = -(-lengths_S // workload.policy.block_size)
    budgets_LS = np.concatenate([each.budgets_LS for each in plan.micro_batches], axis=1)
    base_LS = np.full_like(budgets_LS, workload.policy.base_budget)
    drop_LS = workload.coverage.coverage_LS(blocks_S, base_LS) - workload.coverage.coverage_LS(
        blocks_S, budgets_LS
    )
    return max(0.0, float(np.nan_to_num(drop_LS).max()))
