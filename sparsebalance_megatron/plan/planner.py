# SPDX-License-Identifier: Apache-2.0
"""Lengths, coverage and costs to the plan of one step; pure, so every rank computes the same.

Shape legend: S samples of a global batch, L layers, D ranks, M micro-batches, P stages, V chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.cost.calibrate import StageScales
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.plan import batching
from sparsebalance_megatron.plan.budgets import (
    BudgetRange,
    TunedBudgets,
    feasible_range,
    tune,
)
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.latency import StepCosts, step_costs
from sparsebalance_megatron.plan.pipeline import lower_bound_ms, makespans_ms, schedule_name
from sparsebalance_megatron.plan.search import improve
from sparsebalance_megatron.plan.step_plan import (
    Expectation,
    JobShape,
    MicroBatchPlan,
    PlanError,
    PlanPolicy,
    RankPlan,
    StepPlan,
)


def plan_step(
    *,
    step: int,
    lengths_tokens: Sequence[int],
    job: JobShape,
    policy: PlanPolicy,
    cost: CostModel,
    scales: StageScales,
    coverage: CoverageCurves,
) -> StepPlan:
    """The plan of one step: place the samples, then tune their budgets.

    Batching ``latency`` keeps the best of arrival order, token balance, latency balance and the
    latter improved by search, by simulated makespan at the budgets expected after tuning;
    ``StepPlan.batching`` names the winner. ``arrival`` and ``length`` mean just that, except that a
    balanced packing which the token cap defeats gives way to arrival order where that fits.

    Raises:
        PlanError: no placement exists, or the inputs contradict one another.
    """
    problem = _problem(lengths_tokens, job, policy, cost, scales, coverage)
    name, placement, tuned = _best_candidate(problem, _candidates(problem))
    plan = _assemble(step, problem, name, placement, tuned)
    plan.validate(problem.lengths_tokens, job, policy)
    return plan


def evaluation_plan(
    *,
    step: int,
    lengths_tokens: Sequence[int],
    job: JobShape,
    policy: PlanPolicy,
    cost: CostModel,
    scales: StageScales,
    coverage: CoverageCurves,
) -> StepPlan:
    """Arrival order and base budgets: what evaluation runs, so that its loss is comparable."""
    return plan_step(
        step=step,
        lengths_tokens=lengths_tokens,
        job=job,
        policy=replace(policy, batching="arrival", tuning="off"),
        cost=cost,
        scales=scales,
        coverage=coverage,
    )


@dataclass(frozen=True, kw_only=True)
class _Problem:
    lengths_tokens: tuple[int, ...]
    job: JobShape
    policy: PlanPolicy
    costs: StepCosts
    coverage: CoverageCurves
    allowed: BudgetRange
    schedule: str

    def times_ms(
        self, placement: batching.Placement, budgets_LS: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        slot_of_S = batching.slot_of_sample(placement, len(self.lengths_tokens))
        return self.costs.slot_ms(*self.costs.sample_ms(budgets_LS), slot_of_S)

    def makespans_ms(self, placement: batching.Placement, budgets_LS: np.ndarray) -> np.ndarray:
        return makespans_ms(*self.times_ms(placement, budgets_LS), schedule=self.schedule)


def _problem(
    lengths_tokens: Sequence[int],
    job: JobShape,
    policy: PlanPolicy,
    cost: CostModel,
    scales: StageScales,
    coverage: CoverageCurves,
) -> _Problem:
    if policy.block_size != cost.block_size:
        raise PlanError(
            f"block size {policy.block_size} differs from the cost model's {cost.block_size}; "
            "profile again or change --sparse-balance-block-size"
        )
    if coverage.layers != job.layers:
        raise PlanError(f"coverage curves have {coverage.layers} layers, the job {job.layers}")
    costs = step_costs(lengths_tokens, job, cost, scales)
    return _Problem(
        lengths_tokens=tuple(int(length) for length in lengths_tokens),
        job=job,
        policy=policy,
        costs=costs,
        coverage=coverage,
        allowed=feasible_range(costs, coverage, policy),
        schedule=schedule_name(job.pipeline_stages, job.virtual_stages),
    )


def _expected_budgets(problem: _Problem) -> np.ndarray:
    """Budgets to place by. The makespan policy ends where the slowest rank is at its floors."""
    if problem.policy.tuning == "makespan":
        return problem.allowed.floor_LS
    return problem.allowed.base_LS


def _candidates(problem: _Problem) -> dict[str, batching.Placement]:
    """Named placements to choose from, the simplest first."""
    match problem.policy.batching:
        case "arrival":
            return {"arrival": _arrival(problem)}
        case "length":
            methods = {"length": _length}
        case "latency":
            methods = {"arrival": _arrival, "length": _length, "latency": _latency}
        case other:
            raise PlanError(f"batching {other!r} is not one of arrival, length, latency")
    found: dict[str, batching.Placement] = {}
    failures: list[PlanError] = []
    for name, method in methods.items():
        try:
            found[name] = method(problem)
        except PlanError as error:
            failures.append(error)
    if not found:
        try:
            return {"arrival": _arrival(problem)}
        except PlanError:
            raise failures[-1] from None
    if "latency" in found:
        found["latency+search"] = _searched(problem, found["latency"])
    return found


def _arrival(problem: _Problem) -> batching.Placement:
    return batching.arrival(problem.lengths_tokens, problem.job, problem.policy.max_tokens_per_slot)


def _length(problem: _Problem) -> batching.Placement:
    return batching.balanced(
        problem.costs.lengths_tokens_S,
        problem.lengths_tokens,
        problem.job,
        problem.policy.max_tokens_per_slot,
    )


def _latency(problem: _Problem) -> batching.Placement:
    forward_SC, backward_SC = problem.costs.sample_ms(_expected_budgets(problem))
    return batching.balanced(
        (forward_SC + backward_SC).sum(axis=1),
        problem.lengths_tokens,
        problem.job,
        problem.policy.max_tokens_per_slot,
    )


def _searched(problem: _Problem, placement: batching.Placement) -> batching.Placement:
    return improve(
        placement,
        problem.costs,
        *problem.costs.sample_ms(_expected_budgets(problem)),
        cap_tokens=problem.policy.max_tokens_per_slot,
        schedule=problem.schedule,
    )


def _best_candidate(
    problem: _Problem, candidates: dict[str, batching.Placement]
) -> tuple[str, batching.Placement, TunedBudgets]:
    """Least makespan, then least sum of the ranks' makespans, then the simplest."""
    tuned: dict[str, TunedBudgets] = {}

    def tuned_for(name: str) -> TunedBudgets:
        if name not in tuned:
            slot_of_S = batching.slot_of_sample(candidates[name], len(problem.lengths_tokens))
            tuned[name] = tune(
                problem.policy,
                problem.costs,
                problem.coverage,
                problem.allowed,
                slot_of_S,
                problem.schedule,
            )
        return tuned[name]

    def key(name: str) -> tuple[float, float]:
        budgets_LS = _expected_budgets(problem)
        if problem.policy.tuning == "anchor":
            budgets_LS = tuned_for(name).budgets_LS
        ms_D = problem.makespans_ms(candidates[name], budgets_LS)
        return _rounded(ms_D.max()), _rounded(ms_D.sum())

    name = next(iter(candidates)) if len(candidates) == 1 else min(candidates, key=key)
    return name, candidates[name], tuned_for(name)


def _rounded(ms: float) -> float:
    """To nine digits: sums of the same times in another order are a tie."""
    return float(f"{ms:.8e}")


def _assemble(
    step: int,
    problem: _Problem,
    name: str,
    placement: batching.Placement,
    tuned: TunedBudgets,
) -> StepPlan:
    ranks = tuple(
        RankPlan(micro_batches=tuple(_micro_batch(problem, slot, tuned) for slot in rank))
        for rank in placement
    )
    return StepPlan(
        step=step,
        ranks=ranks,
        expectation=_expectation(problem, placement, tuned),
        batching=name,
    )


def _micro_batch(
    problem: _Problem, samples: tuple[int, ...], tuned: TunedBudgets
) -> MicroBatchPlan:
    budgets_LS = tuned.budgets_LS[:, list(samples)].copy()
    budgets_LS.flags.writeable = False
    return MicroBatchPlan(
        samples=samples,
        lengths_tokens=tuple(problem.lengths_tokens[sample] for sample in samples),
        budgets_LS=budgets_LS,
    )


def _expectation(
    problem: _Problem, placement: batching.Placement, tuned: TunedBudgets
) -> Expectation:
    forward_DPVM, backward_DPVM = problem.times_ms(placement, tuned.budgets_LS)
    work_DPVM = forward_DPVM + backward_DPVM
    base_work = sum(part.sum() for part in problem.times_ms(placement, problem.allowed.base_LS))
    makespans_D = makespans_ms(forward_DPVM, backward_DPVM, schedule=problem.schedule)
    coverage_mean, coverage_min = _coverage(problem, tuned.budgets_LS)
    for times_DPVM in (forward_DPVM, backward_DPVM):
        times_DPVM.flags.writeable = False
    return Expectation(
        makespan_ms=float(makespans_D.max()),
        lower_bound_ms=lower_bound_ms(forward_DPVM, backward_DPVM),
        rank_makespan_ms=tuple(makespans_D.tolist()),
        forward_ms=forward_DPVM,
        backward_ms=backward_DPVM,
        imbalance_micro_batches=_imbalance(work_DPVM.sum(axis=(1, 2))),
        imbalance_rank_sums=_imbalance(work_DPVM.sum(axis=(1, 2, 3))),
        imbalance_makespans=_imbalance(makespans_D),
        coverage_mean=coverage_mean,
        coverage_min=coverage_min,
        work_ratio=float(work_DPVM.sum() / base_work) if base_work else 1.0,
        samples_cut=int(tuned.cut_S.sum()),
        samples_raised=int(tuned.raised_S.sum()),
        samples_clamped=int(tuned.clamped_S.sum()),
    )


def _imbalance(values: np.ndarray) -> float:
    """max/mean; 1 where nothing costs anything."""
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def _coverage(problem: _Problem, budgets_LS: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and minimum over the layers and samples whose curves are known."""
    if not problem.coverage.observed_LU.any():
        return None, None
    coverage_LS = problem.coverage.coverage_LS(problem.costs.blocks_S, budgets_LS)
    known = coverage_LS[~np.isnan(coverage_LS)]
    return (float(known.mean()), float(known.min())) if len(known) else (None, None)
