# SPDX-License-Identifier: Apache-2.0
"""How attention budgets are chosen: three policies with one interface.

Shape legend: S samples, L layers, R data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsebalance_megatron.config import Tuning
from sparsebalance_megatron.plan.budgets.price import Pricing, price
from sparsebalance_megatron.plan.budgets.problem import (
    BudgetProblem,
    BudgetRange,
    base_budgets_LS,
    feasible_range,
)
from sparsebalance_megatron.plan.budgets.tune import least_makespan, towards_anchor
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import PlanError, PlanPolicy


@dataclass(frozen=True, kw_only=True)
class TunedBudgets:
    """``budgets_LS`` int32; where nothing was tuned it is the base budget itself, and
    where budgets are pinned the pinned one.

    ``cut_S``, ``raised_S``: some layer is below, above the base budget. ``clamped_S``: the sample
    could not follow: its micro-batch did not reach the anchor, or all its layers lie at their
    floors on a rank that the step waits for.
    """

    budgets_LS: np.ndarray
    cut_S: np.ndarray
    raised_S: np.ndarray
    clamped_S: np.ndarray


class BudgetPolicy(Protocol):
    """How budgets are chosen: :class:`Off`, :class:`Anchor` or :class:`Makespan`.

    ``compares_tuned``: only tuned budgets tell which of several placements is faster.
    """

    compares_tuned: bool

    def looks_ahead(self, policy: PlanPolicy) -> bool:
        """Whether a plan depends on the samples of later steps."""

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, policy: PlanPolicy
    ) -> BudgetRange:
        """Budgets that may be chosen."""

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: float
    ) -> Pricing | None:
        """What coverage may cost in a step, for policies that trade by a price."""

    def expected_LS(
        self,
        problem: BudgetProblem,
        pricing: Pricing | None,
        tuned_when_balanced: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Budgets to place samples by, those expected after tuning.

        Args:
            tuned_when_balanced: tuned budgets of samples placed by their latency at given budgets.
        """

    def tuned_LS(
        self,
        problem: BudgetProblem,
        micro_batch_of_S: np.ndarray,
        cp_sizes_RM: np.ndarray,
        pricing: Pricing | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Budgets of placed samples, and which samples could not follow, [S]."""


class Off:
    """Every sample keeps its base budget."""

    compares_tuned = False

    def looks_ahead(self, policy: PlanPolicy) -> bool:
        return False

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, policy: PlanPolicy
    ) -> BudgetRange:
        base_LS = base_budgets_LS(costs, coverage, policy)
        return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=base_LS)

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: float
    ) -> Pricing | None:
        return None

    def expected_LS(
        self,
        problem: BudgetProblem,
        pricing: Pricing | None,
        tuned_when_balanced: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        return problem.allowed.base_LS

    def tuned_LS(
        self,
        problem: BudgetProblem,
        micro_batch_of_S: np.ndarray,
        cp_sizes_RM: np.ndarray,
        pricing: Pricing | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        return problem.allowed.base_LS, np.zeros(len(micro_batch_of_S), dtype=bool)


class Anchor(Off):
    """Every micro-batch goes as near to an anchor latency as it may: the paper's rule.

    What that does to a sample depends on its micro-batch. One round of packing and tuning from the
    base budgets stands for the paper's average over recent steps.
    """

    compares_tuned = True

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, policy: PlanPolicy
    ) -> BudgetRange:
        return feasible_range(costs, coverage, policy)

    def expected_LS(
        self,
        problem: BudgetProblem,
        pricing: Pricing | None,
        tuned_when_balanced: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        return tuned_when_balanced(problem.allowed.base_LS)

    def tuned_LS(
        self,
        problem: BudgetProblem,
        micro_batch_of_S: np.ndarray,
        cp_sizes_RM: np.ndarray,
        pricing: Pricing | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        return towards_anchor(problem, micro_batch_of_S, cp_sizes_RM)


class Makespan(Anchor):
    """The least step time that coverage allows, then the most coverage in that time."""

    compares_tuned = False

    def looks_ahead(self, policy: PlanPolicy) -> bool:
        return policy.coverage_target == "base"

    def pricing(
        self, horizon: BudgetProblem, own_samples: slice, coverage_deficit: float
    ) -> Pricing | None:
        return price(horizon, own_samples, coverage_deficit)

    def expected_LS(
        self,
        problem: BudgetProblem,
        pricing: Pricing | None,
        tuned_when_balanced: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        return (pricing or price(problem)).expected_LS

    def tuned_LS(
        self,
        problem: BudgetProblem,
        micro_batch_of_S: np.ndarray,
        cp_sizes_RM: np.ndarray,
        pricing: Pricing | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        return least_makespan(problem, micro_batch_of_S, cp_sizes_RM, pricing or price(problem))


BUDGET_POLICIES: Mapping[Tuning, BudgetPolicy] = {
    "off": Off(),
    "anchor": Anchor(),
    "makespan": Makespan(),
}


def budget_policy(policy: PlanPolicy) -> BudgetPolicy:
    """How the user wants budgets chosen.

    Raises:
        PlanError: the policy names an unknown tuning.
    """
    if policy.tuning not in BUDGET_POLICIES:
        raise PlanError(f"tuning {policy.tuning!r} is not one of {', '.join(BUDGET_POLICIES)}")
    return BUDGET_POLICIES[policy.tuning]


def budget_problem(
    policy: PlanPolicy,
    costs: StepCosts,
    coverage: CoverageCurves,
    pinned_LS: np.ndarray | None = None,
) -> BudgetProblem:
    """The problem whose limits are those of the policy.

    Args:
        pinned_LS: budgets that are given, 0 where they are to be chosen; None pins none.
    """
    allowed = budget_policy(policy).allowed(costs, coverage, policy)
    lengths_S = costs.lengths_tokens_S
    by_tokens = policy.coverage_mean_over == "tokens"
    return BudgetProblem(
        policy=policy,
        costs=costs,
        coverage=coverage,
        allowed=allowed if pinned_LS is None else allowed.pinned(pinned_LS),
        weight_S=lengths_S / lengths_S.mean() if by_tokens else np.ones(len(lengths_S)),
        pinned_S=np.zeros(len(lengths_S), bool) if pinned_LS is None else pinned_LS[0] > 0,
    )


def tune(
    problem: BudgetProblem,
    micro_batch_of_S: np.ndarray,
    cp_sizes_RM: np.ndarray,
    pricing: Pricing | None = None,
) -> TunedBudgets:
    """Budgets of a placed global batch under ``policy.tuning``.

    Args:
        micro_batch_of_S: where the samples are placed: on the first rank of their micro-batches.
        cp_sizes_RM: of the micro-batch that each rank takes part in.
        pricing: what tuning ``makespan`` goes by; by default that of these samples alone.

    Raises:
        PlanError: the policy names an unknown tuning or anchor.
    """
    allowed = problem.allowed
    tuned_LS, clamped_S = budget_policy(problem.policy).tuned_LS(
        problem, micro_batch_of_S, cp_sizes_RM, pricing
    )
    same_LS = (tuned_LS == allowed.base_LS) & ~problem.pinned_S
    return TunedBudgets(
        budgets_LS=np.where(same_LS, problem.policy.base_budget, tuned_LS).astype(np.int32),
        cut_S=(tuned_LS < allowed.base_LS).any(axis=0),
        raised_S=(tuned_LS > allowed.base_LS).any(axis=0),
        clamped_S=clamped_S,
    )
