# SPDX-License-Identifier: Apache-2.0
"""The same global batches planned in several ways, and what each is predicted to take.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.config import Batching, CoverageTarget, Tuning
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.budgets.feasible import feasible_range
from sparsebalance_megatron.plan.budgets.price import horizon_steps
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.coverage_ledger import CoverageLedger
from sparsebalance_megatron.plan.placement.window import assign_window
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.schedules.bounds import sample_bounds
from sparsebalance_megatron.plan.step_costs import base_sample_ms, step_costs
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to plan."""

    batching: Batching
    tuning: Tuning
    coverage_target: CoverageTarget = "threshold"
    window: int = 1


BASELINE = "baseline"
PAPER_ROWS: Mapping[str, Variant] = {
    BASELINE: Variant(batching="arrival", tuning="off"),
    "+DST": Variant(batching="arrival", tuning="anchor"),
    "+SAB": Variant(batching="latency", tuning="off"),
    "+LBB": Variant(batching="length", tuning="off"),
    "LBB+DST": Variant(batching="length", tuning="anchor"),
    "SAB+DST": Variant(batching="latency", tuning="anchor"),
}
"""The rows of the paper's ablation table."""
OURS = "ours"
ALL_ROWS: Mapping[str, Variant] = {
    **PAPER_ROWS,
    OURS: Variant(batching="makespan", tuning="makespan"),
    "ours, base coverage": Variant(batching="makespan", tuning="makespan", coverage_target="base"),
    "ours, window 8": Variant(batching="makespan", tuning="makespan", window=8),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is planned: global batches in order, on a job with its costs and coverage."""

    batches: tuple[tuple[int, ...], ...]
    job: JobShape
    policy: PlanPolicy
    cost: CostModel
    coverage: CoverageCurves

    @property
    def scales(self) -> StageScales:
        return StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant over all steps; means unless said otherwise, imbalances are max/mean.

    ``makespan_ms``: of a step. ``speedup``: the baseline's total time over this variant's;
    ``speedup_least``: in the worst single step (None where a window mixes steps). ``bound_ratio``:
    step time over the lower bound of the same samples; ``bound_ratio_hideable``: over the steps
    that hold no unhideable sample. ``coverage_min_drop``: the largest loss of any sample and layer
    against its base budget. ``work_ratio``: work over that at base budgets. ``plan_ms``: median.
    """

    makespan_ms: float
    speedup: float
    speedup_least: float | None
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
    """Plan every batch with every variant; the first variant is the baseline.

    Args:
        clock: seconds, for the time that planning takes.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    outcomes: dict[str, Outcome] = {}
    for name, variant in variants.items():
        batches = _regrouped(workload, variant.window)
        ledger = CoverageLedger(len(batches[0]))
        runs = []
        for step, batch in enumerate(batches):
            later, owed = _later(batches, step), ledger.snapshot()
            runs.append(_planned(workload, variant, batch, later, owed, clock))
            reached = runs[-1].plan.expectation.coverage_mean
            if reached is not None:
                ledger.settle(base_mean=_base_coverage(workload, batch), executed_mean=reached)
        baseline = next(iter(outcomes.values())) if outcomes else None
        outcomes[name] = _outcome(runs, baseline, mixed=variant.window > 1)
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


def _planned(
    workload: Workload,
    variant: Variant,
    batch: tuple[int, ...],
    later_lengths_tokens: tuple[int, ...],
    owed_coverage: float,
    clock: Callable[[], float],
) -> _Run:
    policy = replace(
        workload.policy,
        batching=variant.batching,
        tuning=variant.tuning,
        coverage_target=variant.coverage_target,
    )
    inputs = PlanInputs(
        lengths_tokens=batch,
        job=workload.job,
        policy=policy,
        cost=workload.cost,
        scales=workload.scales,
        coverage=workload.coverage,
        owed_coverage=owed_coverage,
        later_lengths_tokens=later_lengths_tokens,
    )
    started = clock()
    plan = plan_step(0, inputs)
    return _Run(
        plan=plan,
        plan_ms=(clock() - started) * 1e3,
        largest_drop=_largest_drop(workload, plan),
        hideable=not _unhideable(workload, batch),
    )


def _later(batches: Sequence[tuple[int, ...]], step: int) -> tuple[int, ...]:
    """Samples of the steps after one, as far as its horizon goes; the last one's come anew."""
    steps = horizon_steps(len(batches[step]))
    return tuple(
        length for after in range(1, steps) for length in batches[(step + after) % len(batches)]
    )


def _base_coverage(workload: Workload, batch: tuple[int, ...]) -> float:
    """Mean over the samples and layers whose curves are known."""
    blocks_S = -(-np.array(batch) // workload.policy.block_size)
    base_LS = np.full((workload.job.layers, len(batch)), workload.policy.base_budget)
    return float(np.nanmean(workload.coverage.coverage_LS(blocks_S, base_LS)))


def _outcome(runs: Sequence[_Run], baseline: Outcome | None, *, mixed: bool) -> Outcome:
    expected = [run.plan.expectation for run in runs]
    step_ms = np.array([each.makespan_ms for each in expected])
    baseline_ms = step_ms if baseline is None else np.array(baseline.step_ms)
    ratios = step_ms / [each.lower_bound_ms for each in expected]
    hideable = np.array([run.hideable for run in runs])
    coverage = [each.coverage_mean for each in expected if each.coverage_mean is not None]
    return Outcome(
        makespan_ms=float(step_ms.mean()),
        speedup=float(baseline_ms.sum() / step_ms.sum()),
        speedup_least=None if mixed else float((baseline_ms / step_ms).min()),
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


def _regrouped(workload: Workload, window: int) -> tuple[tuple[int, ...], ...]:
    """The batches after samples were exchanged within every ``window`` of them."""
    if window == 1:
        return workload.batches
    regrouped: list[tuple[int, ...]] = []
    for first in range(0, len(workload.batches), window):
        group = workload.batches[first : first + window]
        lengths = [length for batch in group for length in batch]
        dealt = assign_window(
            base_sample_ms(lengths, workload.job, workload.cost, workload.policy.base_budget),
            len(group),
            len(group[0]),
            data_parallel_size=workload.job.data_parallel_size,
        )
        regrouped += [tuple(lengths[sample] for sample in batch) for batch in dealt]
    return tuple(regrouped)


def _unhideable(workload: Workload, batch: tuple[int, ...]) -> bool:
    costs = step_costs(batch, workload.job, workload.cost, workload.scales)
    policy = replace(workload.policy, tuning="makespan")
    floor_LS = feasible_range(costs, workload.coverage, policy).floor_LS
    bounds = sample_bounds(costs.sample_ms(floor_LS), costs.constant_2C, costs.job)
    return bool(bounds.unhideable_S.any())


def _largest_drop(workload: Workload, plan: StepPlan) -> float:
    slots = plan.slots
    lengths_S = np.array([length for slot in slots for length in slot.lengths_tokens])
    blocks_S = -(-lengths_S // workload.policy.block_size)
    budgets_LS = np.concatenate([slot.budgets_LS for slot in slots], axis=1)
    base_LS = np.full_like(budgets_LS, workload.policy.base_budget)
    drop_LS = workload.coverage.coverage_LS(blocks_S, base_LS) - workload.coverage.coverage_LS(
        blocks_S, budgets_LS
    )
    return max(0.0, float(np.nan_to_num(drop_LS).max()))
