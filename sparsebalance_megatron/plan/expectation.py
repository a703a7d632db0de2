# SPDX-License-Identifier: Apache-2.0
"""Predicts times, coverage and bounds of a plan.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, P pipeline stages,
V virtual stages, M micro-batches, C = P x V chunks, U segments; a leading 2: forward and backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.bounds import segmented_bound_ms, step_bounds
from sparsebalance_megatron.plan.budgets.policy import TunedBudgets
from sparsebalance_megatron.plan.candidate import Candidate
from sparsebalance_megatron.plan.lockstep_times import own_times
from sparsebalance_megatron.plan.metrics import imbalance
from sparsebalance_megatron.plan.segments.segmented_times import segmented_times
from sparsebalance_megatron.plan.step_plan import Expectation
from sparsebalance_megatron.plan.step_problem import StepProblem


def expectation(plan: Candidate, tuned: TunedBudgets) -> Expectation:
    """Times, balance and coverage of a plan with these budgets."""
    problem, arrangement = plan.problem, plan.arrangement
    costs = problem.costs
    tuned_2SC = costs.sample_ms(tuned.budgets_LS)
    if arrangement.segment_starts_blocks:
        times_2RPVM, makespans_R, ms_2UP = segmented_times(costs, arrangement, tuned.budgets_LS)
        end_R = np.cumsum([sum(map(len, of_rank)) for of_rank in arrangement.segment_starts_blocks])
        segment_ms = tuple(np.split(ms_2UP.swapaxes(1, 2), end_R[:-1], axis=2))
    else:
        segment_ms = ()
        times_2RPVM = costs.micro_batch_ms(tuned_2SC, arrangement).by_micro_batch_2RPVM
        makespans_R = problem.budgets.makespans_ms(tuned.budgets_LS, arrangement)
    if costs.job.lockstep_ranks > 1:
        times_2RPVM = own_times(costs, times_2RPVM, arrangement)
    times_2RPVM.flags.writeable = False
    work_RPVM = times_2RPVM[0] + times_2RPVM[1]
    constant_ms = costs.job.places * (costs.constant_2C[0] + costs.constant_2C[1]).sum()
    tuned_work, base_work = (
        constant_ms + sum(sample_SC.sum() for sample_SC in sample_2SC)
        for sample_2SC in (tuned_2SC, costs.sample_ms(problem.budgets.allowed.base_LS))
    )
    coverage_mean, coverage_min = _coverage(problem, tuned.budgets_LS)
    return Expectation(
        makespan_ms=float(makespans_R.max()),
        lower_bound_ms=_lower_bound_ms(problem),
        rank_makespan_ms=tuple(makespans_R.tolist()),
        times_2RPVM=times_2RPVM,
        imbalance_micro_batches=imbalance(work_RPVM.sum(axis=(1, 2))),
        imbalance_rank_sums=imbalance(work_RPVM.sum(axis=(1, 2, 3))),
        imbalance_makespans=imbalance(makespans_R),
        coverage_mean=coverage_mean,
        coverage_min=coverage_min,
        work_ratio=float(tuned_work / base_work) if base_work else 1.0,
        samples_cut=int(tuned.cut_S.sum()),
        samples_raised=int(tuned.raised_S.sum()),
        samples_clamped=int(tuned.clamped_S.sum()),
        segment_ms=segment_ms,
    )


def _lower_bound_ms(problem: StepProblem) -> float:
    """A bound for all placements of these samples at all budgets, cp_sizes, segments and
    numbers of positions that are allowed."""
    limit = problem.plan_settings.max_context_parallel if problem.plans_cp_sizes else 1
    if problem.plans_segments and (problem.job.lockstep_ranks == 1 or limit == 1):
        return segmented_bound_ms(problem, limit)
    bounded = problem if problem.plans_cp_sizes else problem.of_groups
    if problem.plans_positions:
        # Every position costs something, and a bound of one position holds for any number.
        bounded = bounded.with_positions(1)
    costs = bounded.costs
    floor_2SC = costs.sample_ms(bounded.budgets.allowed.floor_LS)
    bound_ms = step_bounds(floor_2SC, costs, limit).bound_ms * float(costs.slowness_RP.min())
    # A step of lockstep groups runs in segments or with planned cp_sizes, not both.
    return min(bound_ms, segmented_bound_ms(problem)) if problem.plans_segments else bound_ms


def _coverage(problem: StepProblem, budgets_LS: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and minimum over the layers and samples whose curves are known."""
    if not problem.budgets.coverage.observed_LU.any():
        return None, None
    coverage_LS = problem.budgets.coverage_LS(budgets_LS)
    known = coverage_LS[~np.isnan(coverage_LS)]
    return (float(known.mean()), float(known.min())) if len(known) else (None, None)
