# SPDX-License-Identifier: Apache-2.0
"""Policies that choose attention budgets: off, towards an anchor (DST), or against the makespan.

The latter two trade in the steps of :mod:`.price`, best coverage per ms first.

Shape legend: S samples, L layers, K budgets of the grid, I chosen steps, R data-parallel ranks,
M micro-batches, J = R x M micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.config import Anchor, Tuning
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.fill import Filling
from sparsebalance_megatron.plan.budgets.price import (
    Pricing,
    budget_steps,
    price,
    price_from_base,
    worth_of_means,
)
from sparsebalance_megatron.plan.budgets.problem import (
    ROUNDING,
    BudgetProblem,
    BudgetRange,
    base_budgets_LS,
    feasible_range,
)
from sparsebalance_megatron.plan.budgets.units import units_of
from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket, mean_of_bucket
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.search_effort import SHARE_OF_STEP_FOR_FILLING, SearchEffort
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import StepCosts

_ANCHORS: Mapping[Anchor, Callable[[np.ndarray], float]] = {
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
}
_TARGET_HALVINGS = 4
"""How often the step time is halved between too little coverage and enough."""


@dataclass(frozen=True, kw_only=True)
class TunedBudgets:
    """``budgets_LS`` int32; where nothing was tuned it is the base budget itself, in dense
    layers all blocks of the sample, and where budgets are pinned the pinned one.

    ``cut_S``, ``raised_S``: some layer is below, above the base budget. ``clamped_S``: the sample
    could not follow: its micro-batch did not reach the anchor, or all its layers lie at their
    floors on a rank that the step waits for.
    """

    budgets_LS: np.ndarray
    cut_S: np.ndarray
    raised_S: np.ndarray
    clamped_S: np.ndarray


class BudgetPolicy:
    """Chooses budgets; this one keeps every sample's base budget.

    ``by_latency``: budgets follow the latency of micro-batches as they are, so that neither
    cp_sizes nor segments are planned. ``places_twice``: samples are balanced at the expected
    budgets, tuned, and placed by what tuning made of them. ``cuts_what_waits``: no step is
    made shorter than equal ranks at base budgets would make it.
    """

    by_latency = False
    places_twice = False
    cuts_what_waits = False

    def looks_ahead(self, plan_settings: PlanSettings) -> bool:
        """Whether a plan depends on the samples of later steps."""
        return False

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        """Budgets that may be chosen."""
        base_LS = base_budgets_LS(costs, coverage, plan_settings)
        return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=base_LS)

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: np.ndarray | float
    ) -> Pricing | None:
        """Price of coverage in a step, for policies that trade by a price."""
        return None

    def expected_LS(self, problem: BudgetProblem, pricing: Pricing | None) -> np.ndarray:
        """Budgets to place samples by."""
        return problem.allowed.base_LS

    def tuned_LS(
        self, problem: BudgetProblem, where: Arrangement, pricing: Pricing | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Budgets of placed samples, and which samples could not follow, [S]."""
        return problem.allowed.base_LS, np.zeros(len(where.micro_batch_of_S), dtype=bool)


class AnchorPolicy(BudgetPolicy):
    """Every micro-batch goes as near to an anchor latency as it may: the paper's rule.

    What that does to a sample depends on its micro-batch. One round of packing and tuning from the
    base budgets stands for the paper's average over recent steps.
    """

    by_latency = True
    places_twice = True

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        return feasible_range(costs, coverage, plan_settings)

    def tuned_LS(
        self, problem: BudgetProblem, where: Arrangement, pricing: Pricing | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slower micro-batches only cut, the step with the least coverage per ms first; faster ones
        only raise, the step with the most first.

        The latency of a micro-batch is its forward and backward ms over all chunks.
        """
        costs, allowed, micro_batch_of_S = problem.costs, problem.allowed, where.micro_batch_of_S
        latency_J = _latency_ms_J(problem, allowed.base_LS, where)
        anchor = problem.plan_settings.anchor
        anchor_ms = float(_ANCHORS[anchor](latency_J))
        slower_S = (latency_J > anchor_ms)[micro_batch_of_S]
        low_LS = np.where(slower_S, allowed.floor_LS, allowed.base_LS)
        high_LS = np.where(slower_S, allowed.base_LS, allowed.top_LS)
        steps = budget_steps(costs, problem.coverage, low_LS, high_LS)
        start_J = _latency_ms_J(problem, low_LS, where)

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


def _latency_ms_J(problem: BudgetProblem, budgets_LS: np.ndarray, where: Arrangement) -> np.ndarray:
    forward_RPVM, backward_RPVM = problem.micro_batch_ms(budgets_LS, where).by_micro_batch_2RPVM
    return (forward_RPVM + backward_RPVM).sum(axis=(1, 2)).ravel()


class MakespanPolicy(BudgetPolicy):
    """The least step time that coverage allows, then the most coverage in that time."""

    def looks_ahead(self, plan_settings: PlanSettings) -> bool:
        return plan_settings.coverage_target == "base"

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        return feasible_range(costs, coverage, plan_settings)

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: np.ndarray | float
    ) -> Pricing:
        return price(horizon, own_samples, coverage_deficit)

    def expected_LS(self, problem: BudgetProblem, pricing: Pricing | None) -> np.ndarray:
        return (pricing or self.pricing(problem, slice(None), 0.0)).expected_LS

    def tuned_LS(
        self, problem: BudgetProblem, where: Arrangement, pricing: Pricing | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makespans only grow with durations, so all budgets at their floors give the least T.

        Raising then fills what every rank has left until T; see :mod:`.fill`. Where more coverage
        is wanted, T grows until it is reached, but never beyond the time of ``pricing.limit_LS``.
        """
        pricing = pricing or self.pricing(problem, slice(None), 0.0)
        costs, allowed, ladder = problem.costs, problem.allowed, pricing.ladder
        micro_batch_of_S = where.micro_batch_of_S
        floor_ms_R = problem.makespans_ms(allowed.floor_LS, where)
        least_ms = floor_ms_R.max() * ROUNDING
        if self.cuts_what_waits:
            base_ms = float(problem.makespans_ms(allowed.base_LS, where).max())
            least_ms = max(least_ms, min(problem.even_ms(where), base_ms) * ROUNDING)
        units = units_of(problem, ladder, where)
        filling = Filling(
            costs=units.costs,
            floor_times=units.floor_times,
            growth_JCQ=units.growth_JCQ,
            effort=SearchEffort(SHARE_OF_STEP_FOR_FILLING * rounded_ms(least_ms)),
        )

        def filled_LS(limit_ms: float) -> np.ndarray:
            return units.budgets_LS(filling.levels_JC(limit_ms))

        def step_ms(budgets_LS: np.ndarray) -> float:
            return float(problem.makespans_ms(budgets_LS, where).max())

        tuned_LS, wanted = filled_LS(least_ms), pricing.wanted_B
        if not problem.covers(tuned_LS, wanted):
            limit_LS, tuned_LS = pricing.limit_LS, pricing.expected_LS
            enough_ms, limit_ms = step_ms(tuned_LS), step_ms(limit_LS)
            if limit_ms < enough_ms:
                # The most coverage in the time that the step may take.
                enough_ms, tuned_LS = limit_ms, filled_LS(max(limit_ms, least_ms))
                if not problem.covers(tuned_LS, np.minimum(problem.covered_B(limit_LS), wanted)):
                    tuned_LS = limit_LS
                if not problem.covers(tuned_LS, wanted):
                    least_ms = enough_ms
            for _ in range(_TARGET_HALVINGS if least_ms < enough_ms else 0):
                if not filling.effort.left:
                    break
                middle_ms = (least_ms + enough_ms) / 2
                middle_LS = filled_LS(middle_ms)
                if problem.covers(middle_LS, wanted):
                    tuned_LS, enough_ms = middle_LS, middle_ms
                else:
                    least_ms = middle_ms
        waited_for_R = floor_ms_R * ROUNDING >= floor_ms_R.max()
        waited_for_S = waited_for_R[micro_batch_of_S // costs.job.micro_batches]
        return tuned_LS, waited_for_S & problem.stuck_S(tuned_LS)


class WaitingPolicy(MakespanPolicy):
    """Cuts what the step waits for and no more, and raises what would idle.

    1. *Step time.* As if work at base budgets were the same on all ranks and in all micro-batches;
       longer where the floors, or held coverage, do not allow that.
    2. *Budgets.* From the floors, each unit of :mod:`.fill` rises to its base budgets, then above
       them, as far as the step time allows. So no unit has both cut and raised budgets, and where
       nobody waits nothing is cut.
    """

    cuts_what_waits = True

    def looks_ahead(self, plan_settings: PlanSettings) -> bool:
        return False

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: np.ndarray | float
    ) -> Pricing:
        return price_from_base(horizon)


BUDGET_POLICIES: Mapping[Tuning, BudgetPolicy] = {
    "off": BudgetPolicy(),
    "anchor": AnchorPolicy(),
    "makespan": MakespanPolicy(),
    "waiting": WaitingPolicy(),
}


def budget_policy(plan_settings: PlanSettings) -> BudgetPolicy:
    """The policy that the user's settings name."""
    return BUDGET_POLICIES[plan_settings.tuning]


def budget_problem(
    plan_settings: PlanSettings,
    costs: StepCosts,
    coverage: CoverageCurves,
    pinned_LS: np.ndarray | None = None,
    coverage_deficit: np.ndarray | float = 0.0,
) -> BudgetProblem:
    """The problem whose limits are those of the policy.

    Args:
        coverage_deficit: of every mean that is held.
        pinned_LS: budgets that are given, 0 where they are to be chosen; None pins none.
    """
    policy = budget_policy(plan_settings)
    allowed = policy.allowed(costs, coverage, plan_settings)
    lengths_S = costs.lengths_tokens_S
    by_tokens = plan_settings.coverage_mean_over == "tokens"
    mean_of_U = mean_of_bucket(plan_settings, coverage.buckets)
    problem = BudgetProblem(
        plan_settings=plan_settings,
        costs=costs,
        coverage=coverage,
        allowed=allowed if pinned_LS is None else allowed.pinned(pinned_LS),
        weight_S=lengths_S.astype(np.float64) if by_tokens else np.ones(len(lengths_S)),
        mean_S=mean_of_U[length_bucket(costs.blocks_S)],
        worth_B=np.ones(mean_of_U[-1] + 1),
        pinned_S=np.zeros(len(lengths_S), bool) if pinned_LS is None else pinned_LS[0] > 0,
    )
    if len(problem.worth_B) > 1 and policy.looks_ahead(plan_settings):
        worth_B = worth_of_means(problem, coverage_deficit)
        problem = replace(problem, worth_B=worth_B, weight_S=worth_B[problem.mean_S])
    return problem


def tune(
    problem: BudgetProblem, where: Arrangement, pricing: Pricing | None = None
) -> TunedBudgets:
    """Budgets of a placed global batch under ``plan_settings.tuning``.

    Args:
        pricing: prices for tuning ``makespan``; by default those of these samples alone.
    """
    tuned_LS, clamped_S = budget_policy(problem.plan_settings).tuned_LS(problem, where, pricing)
    return tuned_budgets(problem, tuned_LS, clamped_S)


def tuned_budgets(
    problem: BudgetProblem, tuned_LS: np.ndarray, clamped_S: np.ndarray
) -> TunedBudgets:
    """Budgets as plans hold them, with what tuning did to every sample."""
    allowed = problem.allowed
    same_LS = (tuned_LS == allowed.base_LS) & ~problem.pinned_S & ~problem.costs.dense_LS
    base_L1 = problem.plan_settings.base_L(len(tuned_LS))[:, None]
    return TunedBudgets(
        budgets_LS=np.where(same_LS, base_L1, tuned_LS).astype(np.int32),
        cut_S=(tuned_LS < allowed.base_LS).any(axis=0),
        raised_S=(tuned_LS > allowed.base_LS).any(axis=0),
        clamped_S=clamped_S,
    )
