# SPDX-License-Identifier: Apache-2.0
"""Slots as wide as their samples ask for: where they lie, and their budgets.

Shape legend: S samples of a global batch, R data-parallel ranks, C chunks; a leading 2: forward and
backward.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from sparsebalance_megatron.plan.budgets.policy import TunedBudgets
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.placement.arrangement import Arrangement
from sparsebalance_megatron.plan.placement.wide_moves import Rules
from sparsebalance_megatron.plan.placement.wide_search import improve_widths
from sparsebalance_megatron.plan.placement.wide_start import wide_start
from sparsebalance_megatron.plan.schedules.step_bounds import step_bounds
from sparsebalance_megatron.plan.search_effort import SHARE_OF_STEP_FOR_WIDTHS
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.plan.step_problem import StepProblem

_STARTS = (np.inf, 4.0, 2.0, 1.0)
"""What a sample may weigh per rank, over the mean of all ranks and positions."""
_FIRST_SEARCH = 0.7
"""Of the search, before budgets are tuned; the rest goes on with those."""
_CLOSE = 1.04
"""By how much tuning may turn which one of two placements is faster."""
_WORTH_SEARCHING = 1.03
"""Over what no widths can beat: an equal placement nearer to that is kept. Large jobs whose samples
all hide are mostly there, and searching their widths would take as long as planning all else."""

_HARDLY_ABOVE = 1.005
"""The same, where a search ends: the rest nobody would notice."""


def best_widths(
    problem: StepProblem, equal: Arrangement | None
) -> tuple[Arrangement, TunedBudgets]:
    """The best of planned widths and of slots of equal width, with tuned budgets.

    Widths are searched at budgets between those expected and the least allowed, since slots that
    the step waits for end below what is expected of all; then again at the budgets that tuning
    gave. Equal widths are tuned only where they may win. Where they are so near to the lower bound
    of all widths, at the expected budgets, that little is to be gained, no others are searched; and
    a search ends where it is hardly above that bound.

    Args:
        equal: the best placement of equal widths; None where there is none.

    Raises:
        PlanError: no placement of the samples exists.
    """
    costs = problem.costs
    if equal is not None and _hardly_beatable(problem, equal):
        return equal, problem.tuned_where(equal)
    search_2SC = (problem.expected_2SC + costs.sample_ms(problem.budgets.allowed.floor_LS)) / 2
    rules = Rules(cap_tokens=problem.cap_tokens, max_width=problem.policy.max_context_parallel)
    try:
        start = _best_start(problem, search_2SC, rules)
    except PlanError:
        if equal is None:
            raise
        return equal, problem.tuned_where(equal)
    plan_ms = problem.search_ms(start, SHARE_OF_STEP_FOR_WIDTHS)

    def searched(where: Arrangement, sample_2SC: np.ndarray, share: float) -> Arrangement:
        return improve_widths(
            where,
            costs,
            sample_2SC,
            rules=rules,
            plan_ms=share * plan_ms,
            enough_ms=_HARDLY_ABOVE * _bound_ms(problem, sample_2SC),
        )

    first = searched(start, search_2SC, _FIRST_SEARCH)
    tuned = problem.tuned_where(first)
    second = searched(first, costs.sample_ms(tuned.budgets_LS), 1.0 - _FIRST_SEARCH)
    found = [(first, tuned)]
    if not second.same_as(first):
        found.append((second, problem.tuned_where(second)))
    if equal is not None:
        first_ms, equal_ms = (
            problem.makespans_ms(where, problem.expected_2SC).max() for where in (first, equal)
        )
        if equal_ms <= _CLOSE * first_ms:
            found.insert(0, (equal, problem.tuned_where(equal)))

    def makespan_ms(candidate: tuple[Arrangement, TunedBudgets]) -> float:
        where, budgets = candidate
        ms_R = problem.makespans_ms(where, costs.sample_ms(budgets.budgets_LS))
        return rounded_ms(ms_R.max())

    return min(found, key=makespan_ms)


def _hardly_beatable(problem: StepProblem, equal: Arrangement) -> bool:
    """Whether a placement is so fast that other widths can gain little, at the expected budgets."""
    bound_ms = _bound_ms(problem, problem.expected_2SC)
    equal_ms = float(problem.makespans_ms(equal, problem.expected_2SC).max())
    return rounded_ms(equal_ms) <= rounded_ms(_WORTH_SEARCHING * bound_ms)


def _bound_ms(problem: StepProblem, sample_2SC: np.ndarray) -> float:
    """What a step takes at least, whatever the widths and places of samples."""
    costs = problem.costs
    bounds = step_bounds(sample_2SC, costs, problem.policy.max_context_parallel)
    return bounds.bound_ms * float(costs.slowness_RP.min())


def _best_start(problem: StepProblem, sample_2SC: np.ndarray, rules: Rules) -> Arrangement:
    """Of starts that share samples more and less eagerly, that with the shortest step.

    Where bytes travel more slowly between many ranks than between few, also of starts with no slot
    wider than that.
    """
    starts: list[Arrangement] = []
    failure: PlanError | None = None
    slowness = {factor for _, factor in problem.costs.exchange.width_slowness}
    halvings = max(1, rules.max_width.bit_length() - 1) if len(slowness) > 1 else 1
    widest = (rules.max_width >> halving for halving in range(halvings))
    for most_over_mean, max_width in product(_STARTS, widest):
        try:
            starts.append(
                wide_start(
                    sample_2SC.sum(axis=(0, 2)),
                    problem.costs,
                    replace(rules, max_width=max_width),
                    most_over_mean,
                )
            )
        except PlanError as error:
            failure = error
    if failure is not None and not starts:
        raise failure
    return min(starts, key=lambda where: problem.makespans_ms(where, sample_2SC).max())
