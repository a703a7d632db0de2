# SPDX-License-Identifier: Apache-2.0
"""Micro-batches whose cp_sizes are planned, and where they run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.candidate import Candidate, shortest
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.search.annealing import anneal
from sparsebalance_megatron.plan.search.cp_size_start import cp_size_start
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.search_effort import SHARE_OF_STEP_FOR_CP_SIZES
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.plan.step_problem import StepProblem

_MAX_WEIGHTS_OVER_MEAN = (np.inf, 4.0, 2.0, 1.0)
"""Starts of the search: the most a sample may weigh per rank, over the mean of all positions."""
_SKIP_RATIO_TO_BOUND = 1.03
"""Other cp_sizes are not searched where equal ones are within this ratio of the lower bound. Large
jobs without very long samples usually are; the search would double their planning time."""

_STOP_RATIO_TO_BOUND = 1.005
"""A search ends within this ratio of the lower bound."""


def best_cp_sizes(
    problem: StepProblem, equal: Arrangement | None, batching: Batching = "makespan"
) -> Candidate:
    """The best of planned cp_sizes and of micro-batches of equal cp_size.

    No others are searched where equal cp_sizes are near the lower bound of all cp_sizes at the
    expected budgets; a search ends near that bound.

    Args:
        equal: the best placement of equal cp_sizes; None where there is none.
        batching: how that one was found.

    Raises:
        PlanError: no placement of the samples exists.
    """
    whole = None if equal is None else Candidate.of(problem, equal, batching)
    if equal is not None and whole is not None and _is_near_bound(problem, equal):
        return whole
    try:
        found = searched_cp_sizes(
            problem, problem.expected_2SC, problem.plan_settings.max_context_parallel
        )
    except PlanError:
        if whole is None:
            raise
        return whole
    return shortest(whole, Candidate.of(problem, found))


def searched_cp_sizes(
    problem: StepProblem, sample_2SC: np.ndarray, max_cp_size: int
) -> Arrangement:
    """The shortest step found of planned cp_sizes at these ms of the samples.

    Raises:
        PlanError: no placement of the samples exists.
    """
    rules = Rules(cap_tokens=problem.cap_tokens, max_cp_size=max_cp_size)
    start = _best_start(problem, sample_2SC, rules)
    return anneal(
        start,
        problem.costs,
        sample_2SC,
        rules=rules,
        plan_ms=problem.search_ms(start, SHARE_OF_STEP_FOR_CP_SIZES),
        enough_ms=_STOP_RATIO_TO_BOUND * _bound_ms(problem, sample_2SC),
    )


def _is_near_bound(problem: StepProblem, equal: Arrangement) -> bool:
    """Whether other cp_sizes can gain little over a placement, at the expected budgets."""
    bound_ms = _bound_ms(problem, problem.expected_2SC)
    equal_ms = float(problem.makespans_ms(equal, problem.expected_2SC).max())
    return rounded_ms(equal_ms) <= rounded_ms(_SKIP_RATIO_TO_BOUND * bound_ms)


def _bound_ms(problem: StepProblem, sample_2SC: np.ndarray) -> float:
    """Lower bound of a step over all cp_sizes and places of samples."""
    costs = problem.costs
    bounds = step_bounds(sample_2SC, costs, problem.plan_settings.max_context_parallel)
    return bounds.bound_ms * float(costs.slowness_RP.min())


def _best_start(problem: StepProblem, sample_2SC: np.ndarray, rules: Rules) -> Arrangement:
    """The start with the shortest step, among starts that share samples more and less eagerly.

    Where bytes travel more slowly between many ranks than between few, starts with a smaller
    largest cp_size are tried as well.
    """
    starts: list[Arrangement] = []
    failure: PlanError | None = None
    slowness = {factor for _, factor in problem.costs.exchange.cp_size_slowness}
    halvings = max(1, rules.max_cp_size.bit_length() - 1) if len(slowness) > 1 else 1
    widest = (rules.max_cp_size >> halving for halving in range(halvings))
    for most_over_mean, max_cp_size in product(_MAX_WEIGHTS_OVER_MEAN, widest):
        try:
            starts.append(
                cp_size_start(
                    sample_2SC.sum(axis=(0, 2)),
                    problem.costs,
                    replace(rules, max_cp_size=max_cp_size),
                    most_over_mean,
                )
            )
        except PlanError as error:
            failure = error
    if failure is not None and not starts:
        raise failure
    return min(starts, key=lambda where: problem.makespans_ms(where, sample_2SC).max())
