# SPDX-License-Identifier: Apache-2.0
"""Attention budgets per sample and layer (DST): towards an anchor, or against the makespan.

Both policies trade in the steps of :mod:`.price_ladder`, best coverage per ms first.

Shape legend: S samples, L layers, K budgets of the grid, I chosen steps, R data-parallel ranks,
P pipeline stages, V virtual stages, M micro-batches, J = R x M micro-batches, U units of a rank, Q
levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from sparsebalance_megatron.config import Anchor
from sparsebalance_megatron.plan.budgets.fill import Filling, unit_growth_JCQ
from sparsebalance_megatron.plan.budgets.price import Pricing
from sparsebalance_megatron.plan.budgets.price_ladder import budget_steps
from sparsebalance_megatron.plan.budgets.problem import ROUNDING, BudgetProblem
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.step_plan import PlanError

_ANCHORS: Mapping[Anchor, Callable[[np.ndarray], float]] = {
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
}
_TARGET_HALVINGS = 2
"""How often the step time is halved between too little coverage and enough."""


def towards_anchor(
    problem: BudgetProblem, micro_batch_of_S: np.ndarray, cp_sizes_RM: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Every micro-batch goes as near to the anchor latency as its feasible budgets allow.

    Slower ones only cut, the step with the least coverage per ms first; faster ones only raise,
    the step with the most first. The latency of a micro-batch is its forward and backward ms over
    all chunks.
    """
    costs, allowed = problem.costs, problem.allowed
    latency_J = _latency_ms_J(problem, allowed.base_LS, micro_batch_of_S, cp_sizes_RM)
    anchor = problem.policy.anchor
    if anchor not in _ANCHORS:
        raise PlanError(f"anchor {anchor!r} is not one of {', '.join(_ANCHORS)}")
    anchor_ms = float(_ANCHORS[anchor](latency_J))
    slower_S = (latency_J > anchor_ms)[micro_batch_of_S]
    low_LS = np.where(slower_S, allowed.floor_LS, allowed.base_LS)
    high_LS = np.where(slower_S, allowed.base_LS, allowed.top_LS)
    steps = budget_steps(costs, problem.coverage, low_LS, high_LS)
    start_J = _latency_ms_J(problem, low_LS, micro_batch_of_S, cp_sizes_RM)

    index_I = np.flatnonzero(steps.pairs_LSK > 0)
    layer_I, sample_I, _ = np.unravel_index(index_I, steps.pairs_LSK.shape)
    micro_batch_I = micro_batch_of_S[sample_I]
    order = np.lexsort((index_I, -steps.slope_LSK.ravel()[index_I], micro_batch_I))
    index_I, micro_batch_I = index_I[order], micro_batch_I[order]
    ms_I = steps.pairs_LSK.ravel()[index_I] * costs.pair_ms_L[layer_I[order]]
    taken = np.zeros(steps.pairs_LSK.size, dtype=bool)
    reached_J = start_J.copy()
    bounds = np.searchsorted(micro_batch_I, np.arange(len(latency_J) + 1))
    for micro_batch, (first, last) in enumerate(itertools.pairwise(bounds)):
        path = start_J[micro_batch] + np.concatenate([[0.0], np.cumsum(ms_I[first:last])])
        nearest = int(np.abs(path - anchor_ms).argmin())
        taken[index_I[first : first + nearest]] = True
        slower = latency_J[micro_batch] > anchor_ms
        reached_J[micro_batch] = max(path[0], anchor_ms) if slower else min(path[-1], anchor_ms)
    clamped_J = np.abs(reached_J - anchor_ms) > 1e-9 * anchor_ms
    return steps.budgets_LS(taken.reshape(steps.pairs_LSK.shape)), clamped_J[micro_batch_of_S]


def _latency_ms_J(
    problem: BudgetProblem,
    budgets_LS: np.ndarray,
    micro_batch_of_S: np.ndarray,
    cp_sizes_RM: np.ndarray,
) -> np.ndarray:
    times = problem.micro_batch_ms(budgets_LS, micro_batch_of_S, cp_sizes_RM)
    forward_RPVM, backward_RPVM = times.by_micro_batch_2RPVM
    return (forward_RPVM + backward_RPVM).sum(axis=(1, 2)).ravel()


def least_makespan(
    problem: BudgetProblem,
    micro_batch_of_S: np.ndarray,
    cp_sizes_RM: np.ndarray,
    pricing: Pricing,
) -> tuple[np.ndarray, np.ndarray]:
    """The least step time that the policy allows, then the most coverage in that time.

    Makespans only grow with durations, so all budgets at their floors give the least T. Raising
    then fills what every rank has left until T; see :mod:`.fill`. Where more coverage is wanted, T
    grows until it is reached, but never beyond what base budgets take.
    """
    costs, allowed, ladder = problem.costs, problem.allowed, pricing.ladder
    floor_times = problem.micro_batch_ms(allowed.floor_LS, micro_batch_of_S, cp_sizes_RM)
    filling = Filling(
        costs=costs,
        floor_times=floor_times,
        growth_JCQ=unit_growth_JCQ(costs, ladder, micro_batch_of_S),
    )
    unit_LS = micro_batch_of_S * costs.chunks + costs.chunk_of_layer_L[:, None]

    def filled_LS(limit_ms: float) -> np.ndarray:
        return ladder.budgets_LS(filling.levels_JC(limit_ms).ravel()[unit_LS])

    def step_ms(budgets_LS: np.ndarray) -> float:
        return float(
            makespans_ms(problem.micro_batch_ms(budgets_LS, micro_batch_of_S, cp_sizes_RM)).max()
        )

    floor_ms_R = makespans_ms(floor_times)
    least_ms = floor_ms_R.max() * ROUNDING
    tuned_LS, wanted = filled_LS(least_ms), pricing.wanted_coverage
    if not problem.covers(tuned_LS, wanted):
        enough_ms, base_ms = step_ms(pricing.expected_LS), step_ms(allowed.base_LS)
        tuned_LS = pricing.expected_LS
        if base_ms < enough_ms:
            # Never slower than base budgets, whatever is wanted: the most coverage in their time.
            enough_ms, tuned_LS = base_ms, filled_LS(max(base_ms, least_ms))
            base_coverage = problem.covered(allowed.base_LS)
            if not problem.covers(tuned_LS, min(base_coverage, wanted)):
                tuned_LS = allowed.base_LS
            if not problem.covers(tuned_LS, wanted):
                least_ms = enough_ms
        for _ in range(_TARGET_HALVINGS if least_ms < enough_ms else 0):
            middle_ms = (least_ms + enough_ms) / 2
            middle_LS = filled_LS(middle_ms)
            if problem.covers(middle_LS, wanted):
                tuned_LS, enough_ms = middle_LS, middle_ms
            else:
                least_ms = middle_ms
    waited_for_S = (floor_ms_R * ROUNDING >= floor_ms_R.max())[
        micro_batch_of_S // costs.job.micro_batches
    ]
    stuck_S = ((tuned_LS == allowed.floor_LS) & (tuned_LS < allowed.top_LS)).all(axis=0)
    return tuned_LS, waited_for_S & stuck_S
