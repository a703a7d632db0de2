# SPDX-License-Identifier: Apache-2.0
"""Policies that choose attention budgets: off, towards an anchor (DST), or raised where ranks idle.

Shape legend: I steps of budgets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.layer_budgets import DENSE
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.allowed import BudgetRange, feasible_range, raised_range
from sparsebalance_megatron.plan.budgets.fill import Filling
from sparsebalance_megatron.plan.budgets.price import budget_steps
from sparsebalance_megatron.plan.budgets.units import units_of
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import check_cp_sizes
from sparsebalance_megatron.plan.pipeline.operation_times import rounded_ms
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import StepCosts, step_costs
from sparsebalance_megatron.plan.step_problem import (
    ROUNDING,
    BudgetPolicy,
    PlanInputs,
    StepProblem,
)
from sparsebalance_megatron.selector_registry import POLICIES

SHARE_OF_STEP_FOR_FILLING, SHARE_OF_STEP_FOR_FILLING_SEGMENTS = 0.05, 0.15
"""Share of a step's time that filling ranks with attention may take; where micro-batches pass in
segments, more price levels are more coverage."""


@dataclass(frozen=True, kw_only=True)
class TunedBudgets:
    """``budgets_LS`` int32; where nothing was tuned it is the base budget itself, in dense
    layers and of longer dense samples all blocks of the sample, and where budgets are pinned the
    pinned one.

    ``cut_S``, ``raised_S``: some layer is below, above the base budget. ``dense_LS``: which layers
    attend to which samples densely, at these budgets.
    """

    budgets_LS: np.ndarray
    cut_S: np.ndarray
    raised_S: np.ndarray
    dense_LS: np.ndarray


class AnchorPolicy(BudgetPolicy):
    """Every micro-batch goes as near to an anchor latency as it may: the paper's rule.

    The mean at base budgets stands for the paper's average over recent steps.
    """

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem: StepProblem, where: Arrangement) -> np.ndarray:
        """Slower micro-batches only cut, the step with the least coverage per ms first; faster ones
        only raise, the step with the most first.

        The latency of a micro-batch is its forward and backward ms over all chunks.
        """
        costs, allowed, micro_batch_of_S = problem.costs, problem.allowed, where.micro_batch_of_S
        latency_J = _latency_ms_J(problem, allowed.base_LS, where)
        anchor_ms = float(latency_J.mean())
        slower_S = (latency_J > anchor_ms)[micro_batch_of_S]
        low_LS = np.where(slower_S, allowed.floor_LS, allowed.base_LS)
        high_LS = np.where(slower_S, allowed.base_LS, allowed.top_LS)
        steps = budget_steps(costs, problem.coverage, costs.length_blocks_S, low_LS, high_LS)
        start_J = _latency_ms_J(problem, low_LS, where)

        index_I = np.flatnonzero(steps.pairs_LSK > 0)
        layer_I, sample_I, _ = np.unravel_index(index_I, steps.pairs_LSK.shape)
        micro_batch_I = micro_batch_of_S[sample_I]
        order = np.lexsort((index_I, -steps.slope_LSK.ravel()[index_I], micro_batch_I))
        index_I, micro_batch_I = index_I[order], micro_batch_I[order]
        ms_I = steps.pairs_LSK.ravel()[index_I] * costs.pair_ms_L[layer_I[order]]
        taken = np.zeros(steps.pairs_LSK.size, dtype=bool)
        bounds = np.searchsorted(micro_batch_I, np.arange(len(latency_J) + 1))
        for micro_batch, (first, last) in enumerate(pairwise(bounds)):
            path = start_J[micro_batch] + np.concatenate([[0.0], np.cumsum(ms_I[first:last])])
            nearest = int(np.abs(path - anchor_ms).argmin())
            taken[index_I[first : first + nearest]] = True
        return steps.budgets_LS(taken.reshape(steps.pairs_LSK.shape))


def _latency_ms_J(problem: StepProblem, budgets_LS: np.ndarray, where: Arrangement) -> np.ndarray:
    times_2EPVM = problem.micro_batch_ms(budgets_LS, where).by_micro_batch_2RPVM
    latency_EM = times_2EPVM.sum(axis=0).sum(axis=(1, 2))
    return np.repeat(latency_EM, problem.costs.job.lockstep_ranks, axis=0).ravel()


class RaisePolicy(BudgetPolicy):
    """Nobody reads less than the base budget; whoever would idle reads more.

    1. *Step time.* What the step takes at base budgets, where its samples are placed.
    2. *Budgets.* From base budgets the units of :mod:`.fill` rise, most coverage per ms first, as
       far as the step time allows.
    """

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        return raised_range(costs, coverage, plan_settings)

    def tuned_LS(self, problem: StepProblem, where: Arrangement) -> np.ndarray:
        base_LS = problem.allowed.base_LS
        if (base_LS == problem.allowed.top_LS).all():
            return base_LS
        limit_ms = float(problem.makespans_ms(base_LS, where).max()) * ROUNDING
        cut = where.segment_starts_blocks
        share = SHARE_OF_STEP_FOR_FILLING_SEGMENTS if cut else SHARE_OF_STEP_FOR_FILLING
        effort = SearchEffort(share * rounded_ms(limit_ms))
        pipelines, budgets_of = units_of(problem, where, effort)
        raised_LS = budgets_of(
            Filling(pipelines=pipelines, effort=effort, limit_ms=limit_ms).levels_JC()
        )
        # Members of a row are level over all its segments, not in each.
        fits = problem.makespans_ms(raised_LS, where).max() <= limit_ms
        if not fits:
            return base_LS
        return no_dearer_than_dense_LS(problem, where, raised_LS)


def no_dearer_than_dense_LS(
    problem: StepProblem, where: Arrangement, raised_LS: np.ndarray
) -> np.ndarray:
    """Raised budgets, at which no layer of a document takes longer than dense attention would.

    A layer that takes as long reads everything, densely, where it can: it attends densely to all
    documents of the micro-batch before that one, of which the first are those that most layers
    attend to densely. Elsewhere it goes back to the last budget that takes less. Where there are
    segments, and in jobs without dense attention, raised budgets stay lists.
    """
    may_be_dense_LS = _may_be_dense_LS(problem, where, raised_LS)
    if not may_be_dense_LS.any():
        return raised_LS
    costs, base_LS = problem.costs, problem.allowed.base_LS
    pair_2L1 = costs.pair_2C[:, costs.chunk_of_layer_L, None]
    dense_2LS = costs.denser_2SL.swapaxes(1, 2)

    def more_2LS(budgets_LS: np.ndarray) -> np.ndarray:
        """Ms beyond those of dense attention."""
        return costs.block_pairs(budgets_LS) * pair_2L1 - dense_2LS

    dearer_LS = may_be_dense_LS & (more_2LS(raised_LS) >= 0.0).all(axis=0)
    dearer_LS &= more_2LS(base_LS).sum(axis=0) < 0.0
    wanted_LS = dearer_LS | costs.dense_LS
    order_I = in_order(problem, where, wanted_LS)
    becomes_LS = leading_LS(wanted_LS, order_I, where.micro_batch_of_S) & dearer_LS
    # One that read everything by lists would be attended to densely.
    most_LS = np.where(may_be_dense_LS, np.minimum(raised_LS, costs.blocks_S - 1), raised_LS)
    low_LS, high_LS = np.where(may_be_dense_LS, base_LS, raised_LS), most_LS
    while (low_LS < high_LS).any():
        middle_LS = (low_LS + high_LS + 1) // 2
        takes_less_LS = more_2LS(middle_LS).sum(axis=0) < 0.0
        low_LS = np.where(takes_less_LS, middle_LS, low_LS)
        high_LS = np.where(takes_less_LS, high_LS, np.maximum(middle_LS - 1, low_LS))
    return np.where(becomes_LS, costs.blocks_S, low_LS)


def _may_be_dense_LS(
    problem: StepProblem, where: Arrangement, budgets_LS: np.ndarray
) -> np.ndarray:
    """Mask of raised and of pinned budgets at which layers may attend densely."""
    config, costs = problem.plan_settings.config, problem.costs
    attends_densely = config.tuning == "raise" and config.dense_up_to_tokens > 0
    if not attends_densely or where.segment_starts_blocks:
        return np.zeros_like(costs.dense_LS)
    chosen_LS = (budgets_LS > problem.allowed.base_LS) | problem.pinned_S
    return np.asarray(chosen_LS & ~costs.dense_LS)


def in_order(problem: StepProblem, where: Arrangement, dense_LS: np.ndarray) -> np.ndarray:
    """The samples of all micro-batches, one after another.

    Those of a micro-batch in one piece that most layers attend to densely are first, so that these
    find them side by side; else samples keep their order. A caller's own placement keeps its order,
    too: the caller may have packed by it.
    """
    sample_I = np.array([*chain.from_iterable(chain.from_iterable(where.samples))])
    if problem.inputs.placement is not None or where.segment_starts_blocks:
        return sample_I
    dense_layers_I, place_I = dense_LS.sum(axis=0)[sample_I], where.micro_batch_of_S[sample_I]
    return sample_I[np.lexsort((-dense_layers_I, place_I))]


def with_leading(problem: StepProblem, where: Arrangement) -> StepProblem:
    """The problem of placed samples, where layers attend densely to those that they find side by
    side, first in their micro-batch, and to others by lists."""
    dense_LS, place_S = problem.costs.dense_LS, where.micro_batch_of_S
    found_LS = leading_LS(dense_LS, in_order(problem, where, dense_LS), place_S)
    if (found_LS == dense_LS).all():
        return problem
    return replace(problem, costs=replace(problem.costs, dense_LS=found_LS))


def leading_LS(
    mask_LS: np.ndarray, order_I: np.ndarray, micro_batch_of_S: np.ndarray
) -> np.ndarray:
    """The part of a mask of samples that has none before it in its micro-batch outside the mask.

    Args:
        order_I: the samples of all micro-batches, one after another.
    """
    place_I = micro_batch_of_S[order_I]
    begins_I = np.diff(place_I, prepend=place_I[0] - 1) != 0
    outside_LI = ~mask_LS[:, order_I]
    until_LI = np.cumsum(outside_LI, axis=1)
    before_LJ = (until_LI - outside_LI)[:, begins_I]
    found_LS = np.zeros_like(mask_LS)
    found_LS[:, order_I] = until_LI == before_LJ[:, np.cumsum(begins_I) - 1]
    return found_LS


BUDGET_POLICIES: Mapping[str, BudgetPolicy] = {
    "off": BudgetPolicy(),
    "anchor": AnchorPolicy(),
    "raise": RaisePolicy(),
}


@cache
def budget_policy(tuning: str) -> BudgetPolicy:
    """The policy of that name, of this package or another."""
    policy: BudgetPolicy = BUDGET_POLICIES.get(tuning) or POLICIES.load(tuning)
    return policy


def step_problem(inputs: PlanInputs) -> StepProblem:
    """The problem that the inputs pose, under the policy of their settings.

    Raises:
        PlanError: the inputs contradict one another.
    """
    job, plan_settings, coverage = inputs.job, inputs.plan_settings, inputs.coverage
    cp_size = job.context_parallel_size
    check_cp_sizes(job.data_parallel_size, cp_size, plan_settings.max_cp_size)
    if plan_settings.config.block_size != inputs.cost.block_size:
        raise PlanError(
            f"block size {plan_settings.config.block_size} differs from the cost model's "
            f"{inputs.cost.block_size}; profile again or change --sparse-balance-block-size"
        )
    if coverage.layers != job.layers:
        raise PlanError(f"coverage curves have {coverage.layers} layers, the job {job.layers}")
    lengths, pinned_LS = inputs.lengths_tokens, inputs.pinned_LS
    dense_LS = plan_settings.dense_LS(job.layers, lengths)
    if pinned_LS is not None:
        _check_pinned(pinned_LS, (job.layers, len(lengths)))
        blocks_S = -(-np.array(lengths) // plan_settings.config.block_size)
        dense_LS &= (pinned_LS == 0) | (pinned_LS >= blocks_S)
    costs = step_costs(lengths, job, inputs.cost, inputs.scales, dense_LS)
    policy = budget_policy(plan_settings.config.tuning)
    allowed = policy.allowed(costs, coverage, plan_settings)
    return StepProblem(
        inputs=inputs,
        costs=costs,
        policy=policy,
        allowed=allowed if pinned_LS is None else allowed.pinned(pinned_LS),
    )


def _check_pinned(pinned_LS: np.ndarray, shape: tuple[int, int]) -> None:
    if pinned_LS.shape != shape:
        raise PlanError(
            f"pinned budgets have shape {pinned_LS.shape}, expected {shape} (layers, samples)"
        )
    if ((pinned_LS > 0).any(axis=0) != (pinned_LS > 0).all(axis=0)).any() or pinned_LS.min() < 0:
        raise PlanError("pinned budgets: a sample's must be at least 1 in every layer, or 0 in all")


def tune(problem: StepProblem, where: Arrangement) -> TunedBudgets:
    """Budgets of a placed global batch under ``plan_settings.config.tuning``."""
    budgets_LS = problem.policy.tuned_LS(problem, where)
    allowed, costs = problem.allowed, problem.costs
    becomes_LS = _may_be_dense_LS(problem, where, budgets_LS) & (budgets_LS >= costs.blocks_S)
    base_L1 = problem.plan_settings.base_L(len(budgets_LS))[:, None]
    same_LS = (budgets_LS == allowed.base_LS) & ~problem.pinned_S & (base_L1 != DENSE)
    return TunedBudgets(
        budgets_LS=np.where(same_LS, np.maximum(base_L1, budgets_LS), budgets_LS).astype(np.int32),
        cut_S=(budgets_LS < allowed.base_LS).any(axis=0),
        raised_S=(budgets_LS > allowed.base_LS).any(axis=0),
        dense_LS=costs.dense_LS | becomes_LS,
    )
