# SPDX-License-Identifier: Apache-2.0
"""Lengths, coverage and costs to the plan of one step; pure, so every rank computes the same.

Shape legend: S samples of a global batch, L layers, D ranks, M micro-batches, P stages, V chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_calibration import StageScales
from sparsebalance_megatron.plan.budgets.feasible import BudgetRange, feasible_range
from sparsebalance_megatron.plan.budgets.price import Pricing, price
from sparsebalance_megatron.plan.budgets.tune import TunedBudgets, tune
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.metrics import imbalance
from sparsebalance_megatron.plan.placement import balance
from sparsebalance_megatron.plan.placement.search import improve
from sparsebalance_megatron.plan.schedules.bounds import sample_bounds
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms, schedule_name
from sparsebalance_megatron.plan.step_costs import StepCosts, step_costs
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
    hold_ms: float = 0.0,
    owed_coverage: float = 0.0,
    later_lengths_tokens: Sequence[int] = (),
) -> StepPlan:
    """The plan of one step: place the samples, then tune their budgets.

    Batching ``makespan`` keeps the best of arrival order, token balance, latency balance and the
    latter improved by search, by simulated makespan at the budgets expected after tuning;
    ``StepPlan.batching`` names the winner. ``arrival``, ``length`` and ``latency`` mean just that,
    except that a balanced packing which the token cap defeats gives way to arrival order where that
    fits. Tuning ``makespan`` may take until ``hold_ms`` where the least step time is shorter. With
    the coverage target ``base``, coverage summed over this step's samples and the later ones
    exceeds that of the base budgets by ``owed_coverage``, or may fall below it by as much if that
    is negative; this step's share follows from one price for all (:mod:`.pricing`), and is paid as
    far as a step at base budgets has the time.

    Raises:
        PlanError: no placement exists, or the inputs contradict one another.
    """
    problem = _problem(
        lengths_tokens,
        job=job,
        policy=policy,
        cost=cost,
        scales=scales,
        coverage=coverage,
        hold_ms=hold_ms,
        owed_coverage=owed_coverage,
        later_lengths_tokens=later_lengths_tokens,
    )
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
    hold_ms: float
    pricing: Pricing | None
    """Of tuning ``makespan``."""

    @cached_property
    def expected_LS(self) -> np.ndarray:
        """Budgets to place by, those expected after tuning.

        What an anchor does to a sample depends on its micro-batch; one round of packing and tuning
        from the base budgets takes the part of the paper's average over recent steps.
        """
        if self.pricing is not None:
            return self.pricing.expected_LS
        if self.policy.tuning != "anchor":
            return self.allowed.base_LS
        try:
            placement = self.balanced_by(self.allowed.base_LS)
        except PlanError:
            return self.allowed.base_LS
        return self.tuned(placement).budgets_LS

    @cached_property
    def expected_ms(self) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward ms [S, C] at the expected budgets."""
        return self.costs.sample_ms(self.expected_LS)

    def balanced_by(self, budgets_LS: np.ndarray) -> balance.Placement:
        """Latency-balanced placement at these budgets."""
        forward_SC, backward_SC = self.costs.sample_ms(budgets_LS)
        return balance.balanced(
            (forward_SC + backward_SC).sum(axis=1),
            self.lengths_tokens,
            self.job,
            self.policy.max_tokens_per_slot,
            self.costs.slowness_D,
        )

    def tuned(self, placement: balance.Placement) -> TunedBudgets:
        return tune(
            self.policy,
            self.costs,
            self.coverage,
            self.allowed,
            balance.slot_of_sample(placement, len(self.lengths_tokens)),
            self.schedule,
            self.pricing,
            self.hold_ms,
        )

    def times_ms(
        self, placement: balance.Placement, sample_ms: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward ms [D, P, V, M], from those of every sample, [S, C]."""
        slot_of_S = balance.slot_of_sample(placement, len(self.lengths_tokens))
        return self.costs.slot_ms(*sample_ms, slot_of_S)

    def makespans_ms(
        self, placement: balance.Placement, sample_ms: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        return makespans_ms(*self.times_ms(placement, sample_ms), schedule=self.schedule)


def _problem(
    lengths_tokens: Sequence[int],
    *,
    job: JobShape,
    policy: PlanPolicy,
    cost: CostModel,
    scales: StageScales,
    coverage: CoverageCurves,
    hold_ms: float,
    owed_coverage: float,
    later_lengths_tokens: Sequence[int],
) -> _Problem:
    if policy.block_size != cost.block_size:
        raise PlanError(
            f"block size {policy.block_size} differs from the cost model's {cost.block_size}; "
            "profile again or change --sparse-balance-block-size"
        )
    if coverage.layers != job.layers:
        raise PlanError(f"coverage curves have {coverage.layers} layers, the job {job.layers}")
    own = slice(len(lengths_tokens))
    tunes = policy.tuning == "makespan"
    if tunes and policy.coverage_target == "base":
        lengths_tokens = (*lengths_tokens, *later_lengths_tokens)
    horizon = step_costs(lengths_tokens, job, cost, scales)
    allowed = feasible_range(horizon, coverage, policy)
    pricing = price(policy, horizon, coverage, allowed, own, owed_coverage) if tunes else None
    return _Problem(
        lengths_tokens=tuple(int(length) for length in lengths_tokens[own]),
        job=job,
        policy=policy,
        costs=horizon.of(own),
        coverage=coverage,
        allowed=allowed.of(own),
        schedule=schedule_name(job.pipeline_stages, job.virtual_stages),
        hold_ms=hold_ms,
        pricing=pricing,
    )


def _candidates(problem: _Problem) -> dict[str, balance.Placement]:
    """Named placements to choose from, the simplest first."""
    match problem.policy.batching:
        case "arrival":
            return {"arrival": _arrival(problem)}
        case "length":
            methods = {"length": _length}
        case "latency":
            methods = {"latency": _latency}
        case "makespan":
            methods = {"arrival": _arrival, "length": _length, "latency": _latency}
        case other:
            raise PlanError(f"batching {other!r} is not one of arrival, length, latency, makespan")
    found: dict[str, balance.Placement] = {}
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
    if problem.policy.batching == "makespan":
        start = found.get("latency") or next(iter(found.values()))
        found["makespan"] = _searched(problem, start)
    return found


def _arrival(problem: _Problem) -> balance.Placement:
    return balance.arrival(problem.lengths_tokens, problem.job, problem.policy.max_tokens_per_slot)


def _length(problem: _Problem) -> balance.Placement:
    return balance.balanced(
        problem.costs.lengths_tokens_S,
        problem.lengths_tokens,
        problem.job,
        problem.policy.max_tokens_per_slot,
    )


def _latency(problem: _Problem) -> balance.Placement:
    return problem.balanced_by(problem.expected_LS)


def _searched(problem: _Problem, placement: balance.Placement) -> balance.Placement:
    return improve(
        placement,
        problem.costs,
        *problem.expected_ms,
        cap_tokens=problem.policy.max_tokens_per_slot,
        schedule=problem.schedule,
        plan_ms=problem.policy.plan_ms,
    )


def _best_candidate(
    problem: _Problem, candidates: dict[str, balance.Placement]
) -> tuple[str, balance.Placement, TunedBudgets]:
    """Least makespan, then least sum of the ranks' makespans, then the simplest.

    Only the winner is tuned, except where tuning towards an anchor decides who wins.
    """
    if len(candidates) == 1:
        ((name, placement),) = candidates.items()
        return name, placement, problem.tuned(placement)
    by_tuning = problem.policy.tuning == "anchor"
    tuned = {name: problem.tuned(where) for name, where in candidates.items()} if by_tuning else {}

    def key(name: str) -> tuple[float, float]:
        sample_ms = (
            problem.costs.sample_ms(tuned[name].budgets_LS) if by_tuning else problem.expected_ms
        )
        ms_D = problem.makespans_ms(candidates[name], sample_ms)
        return _rounded(ms_D.max()), _rounded(ms_D.sum())

    name = min(candidates, key=key)
    placement = candidates[name]
    return name, placement, tuned[name] if by_tuning else problem.tuned(placement)


def _rounded(ms: float) -> float:
    """To nine digits: sums of the same times in another order are a tie."""
    return float(f"{ms:.8e}")


def _assemble(
    step: int,
    problem: _Problem,
    name: str,
    placement: balance.Placement,
    tuned: TunedBudgets,
) -> StepPlan:
    slots = [slot for rank in placement for slot in rank]
    ends = np.cumsum([len(slot) for slot in slots]).tolist()
    budgets_LS = np.ascontiguousarray(tuned.budgets_LS[:, [s for slot in slots for s in slot]])
    budgets_LS.flags.writeable = False
    micro_batches = [
        MicroBatchPlan(
            samples=slot,
            lengths_tokens=tuple(problem.lengths_tokens[sample] for sample in slot),
            budgets_LS=budgets_LS[:, end - len(slot) : end],
        )
        for slot, end in zip(slots, ends, strict=True)
    ]
    per_rank = problem.job.micro_batches
    ranks = tuple(
        RankPlan(micro_batches=tuple(micro_batches[first : first + per_rank]))
        for first in range(0, len(slots), per_rank)
    )
    return StepPlan(
        step=step,
        ranks=ranks,
        expectation=_expectation(problem, placement, tuned),
        batching=name,
    )


def _expectation(
    problem: _Problem, placement: balance.Placement, tuned: TunedBudgets
) -> Expectation:
    costs = problem.costs
    forward_DPVM, backward_DPVM = problem.times_ms(placement, costs.sample_ms(tuned.budgets_LS))
    work_DPVM = forward_DPVM + backward_DPVM
    constant_C = costs.constant_forward_C + costs.constant_backward_C
    tuned_work, base_work = (
        problem.job.slots * constant_C.sum() + sum(part.sum() for part in costs.sample_ms(each_LS))
        for each_LS in (tuned.budgets_LS, problem.allowed.base_LS)
    )
    makespans_D = makespans_ms(forward_DPVM, backward_DPVM, schedule=problem.schedule)
    coverage_mean, coverage_min = _coverage(problem, tuned.budgets_LS)
    for times_DPVM in (forward_DPVM, backward_DPVM):
        times_DPVM.flags.writeable = False
    return Expectation(
        makespan_ms=float(makespans_D.max()),
        lower_bound_ms=_lower_bound_ms(problem),
        rank_makespan_ms=tuple(makespans_D.tolist()),
        forward_ms=forward_DPVM,
        backward_ms=backward_DPVM,
        imbalance_micro_batches=imbalance(work_DPVM.sum(axis=(1, 2))),
        imbalance_rank_sums=imbalance(work_DPVM.sum(axis=(1, 2, 3))),
        imbalance_makespans=imbalance(makespans_D),
        coverage_mean=coverage_mean,
        coverage_min=coverage_min,
        work_ratio=float(tuned_work / base_work) if base_work else 1.0,
        samples_cut=int(tuned.cut_S.sum()),
        samples_raised=int(tuned.raised_S.sum()),
        samples_clamped=int(tuned.clamped_S.sum()),
    )


def _lower_bound_ms(problem: _Problem) -> float:
    """Of every placement of these samples at every budget the policy allows."""
    costs = problem.costs
    floor_ms = costs.sample_ms(problem.allowed.floor_LS)
    bounds = sample_bounds(
        *floor_ms,
        costs.constant_forward_C,
        costs.constant_backward_C,
        data_parallel_size=costs.data_parallel_size,
        micro_batches=costs.micro_batches,
        virtual_stages=costs.virtual_stages,
    )
    work_P = _work_of_stages_ms(problem, floor_ms)
    return max(
        bounds.bound_ms * float(costs.slowness_DP.min()),
        float((work_P / (1.0 / costs.slowness_DP).sum(axis=0)).max()),
    )


def _work_of_stages_ms(problem: _Problem, sample_ms: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """[P] of all ranks together, on average devices.

    Within T, rank d of stage p does work T / slowness[d, p] at most; so T is at least the work over
    the sum of what the ranks do in one ms.
    """
    costs = problem.costs
    constant_C = costs.constant_forward_C + costs.constant_backward_C
    work_C = sum(part.sum(axis=0) for part in sample_ms) + problem.job.slots * constant_C
    return np.asarray(work_C).reshape(costs.pipeline_stages, -1).sum(axis=1)


def _coverage(problem: _Problem, budgets_LS: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and minimum over the layers and samples whose curves are known."""
    if not problem.coverage.observed_LU.any():
        return None, None
    coverage_LS = problem.coverage.coverage_LS(problem.costs.blocks_S, budgets_LS)
    known = coverage_LS[~np.isnan(coverage_LS)]
    return (float(known.mean()), float(known.min())) if len(known) else (None, None)
