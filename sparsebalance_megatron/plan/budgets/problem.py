# SPDX-License-Identifier: Apache-2.0
"""What a choice of budgets starts from, and which budgets the coverage threshold allows.

Shape legend: S samples, L layers, Z sizes (samples of as many blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.schedules.operation_times import OperationTimes
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import PlanPolicy

ROUNDING = 1.0 + 1e-9
"""Above what sums of the same numbers in another order differ by."""


@dataclass(frozen=True, kw_only=True)
class BudgetRange:
    """Feasible budgets of every (layer, sample), int64 [L, S]: floor <= base <= top.

    Never observed curves allow no move: floor = base = top.
    """

    floor_LS: np.ndarray
    base_LS: np.ndarray
    top_LS: np.ndarray

    def of(self, samples: slice) -> BudgetRange:
        """That of some of the samples."""
        return BudgetRange(
            floor_LS=self.floor_LS[:, samples],
            base_LS=self.base_LS[:, samples],
            top_LS=self.top_LS[:, samples],
        )


def feasible_range(
    costs: StepCosts,
    coverage: CoverageCurves,
    policy: PlanPolicy,
    pinned_LS: np.ndarray | None = None,
) -> BudgetRange:
    """Budgets that keep coverage within the policy's threshold of the base budget's.

    Pinned budgets allow no others, and stand for the base budgets of their samples.
    """
    if pinned_LS is not None:
        free = feasible_range(costs, coverage, policy)
        floor_LS, base_LS, top_LS = (
            np.where(pinned_LS > 0, pinned_LS, limit_LS)
            for limit_LS in (free.floor_LS, free.base_LS, free.top_LS)
        )
        return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)
    base_S = np.minimum(policy.base_budget, costs.blocks_S)
    base_LS = np.broadcast_to(base_S, (coverage.layers, len(base_S)))
    if policy.tuning == "off":
        return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=base_LS)
    blocks_Z, size_S = np.unique(costs.blocks_S, return_inverse=True)
    floor_LS = least_feasible_budget(
        coverage, blocks_Z, policy.base_budget, policy.coverage_threshold
    )[:, size_S]
    observed_LS = coverage.observed_LS(costs.blocks_S)
    top_LS = np.where(observed_LS, np.maximum(costs.blocks_S, base_LS), base_LS)
    return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)


@dataclass(frozen=True, kw_only=True)
class BudgetProblem:
    """Samples whose budgets are to be chosen: the policy, their costs, coverage and limits.

    ``weight_S``: what a sample's coverage counts in sums, 1 on average over the horizon.
    ``pinned_S``: whose budgets are given and not to be chosen.
    """

    policy: PlanPolicy
    costs: StepCosts
    coverage: CoverageCurves
    allowed: BudgetRange
    weight_S: np.ndarray
    pinned_S: np.ndarray

    @classmethod
    def under(
        cls,
        policy: PlanPolicy,
        costs: StepCosts,
        coverage: CoverageCurves,
        pinned_LS: np.ndarray | None = None,
    ) -> BudgetProblem:
        """The problem whose limits are those of the policy's coverage threshold.

        Args:
            pinned_LS: budgets that are given, 0 where they are to be chosen; None pins none.
        """
        allowed = feasible_range(costs, coverage, policy, pinned_LS)
        lengths_S = costs.lengths_tokens_S
        weight_S = (
            lengths_S / lengths_S.mean()
            if policy.coverage_mean_over == "tokens"
            else np.ones(len(lengths_S))
        )
        pinned_S = np.zeros(len(lengths_S), bool) if pinned_LS is None else pinned_LS[0] > 0
        return cls(
            policy=policy,
            costs=costs,
            coverage=coverage,
            allowed=allowed,
            weight_S=weight_S,
            pinned_S=pinned_S,
        )

    def of(self, samples: slice) -> BudgetProblem:
        """That of some of the samples."""
        return replace(
            self,
            costs=self.costs.of(samples),
            allowed=self.allowed.of(samples),
            weight_S=self.weight_S[samples],
            pinned_S=self.pinned_S[samples],
        )

    @property
    def size_S(self) -> np.ndarray:
        """Equal for samples that are alike in all but their place: of as many blocks, and free.

        A sample with pinned budgets is like no other.
        """
        own_S = self.costs.blocks_S.max() + 1 + np.arange(len(self.pinned_S))
        return np.where(self.pinned_S, own_S, self.costs.blocks_S)

    def coverage_LS(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Expected coverage; NaN where the curve is not known."""
        return self.coverage.coverage_LS(self.costs.blocks_S, budgets_LS)

    def covered(self, budgets_LS: np.ndarray) -> float:
        """Coverage by weight, summed where curves are known."""
        return float(np.nansum(self.coverage_LS(budgets_LS) * self.weight_S))

    def covers(self, budgets_LS: np.ndarray, wanted_coverage: float) -> bool:
        """Whether :meth:`covered` is at least what is wanted."""
        return self.covered(budgets_LS) * ROUNDING >= wanted_coverage

    def slot_ms(
        self,
        budgets_LS: np.ndarray,
        slot_of_S: np.ndarray,
        widths_RM: np.ndarray,
    ) -> OperationTimes:
        """Times of the slots that hold the samples."""
        return self.costs.slot_ms(self.costs.sample_ms(budgets_LS), slot_of_S, widths_RM)
