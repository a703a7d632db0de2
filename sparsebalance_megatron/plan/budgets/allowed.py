# SPDX-License-Identifier: Apache-2.0
"""Budgets that policies allow: no less than the base budget, or than the coverage threshold."""

from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import StepCosts


@dataclass(frozen=True, kw_only=True)
class BudgetRange:
    """Feasible budgets of every (layer, sample), int64 [L, S]: floor <= base <= top.

    Never observed curves allow no move: floor = base = top; nor do dense layers.
    """

    floor_LS: np.ndarray
    base_LS: np.ndarray
    top_LS: np.ndarray

    def pinned(self, pinned_LS: np.ndarray) -> "BudgetRange":
        """This range, but pinned budgets, above 0, allow no others and stand for base budgets."""
        floor_LS, base_LS, top_LS = (
            np.where(pinned_LS > 0, pinned_LS, limit_LS)
            for limit_LS in (self.floor_LS, self.base_LS, self.top_LS)
        )
        return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)


def raised_range(
    costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
) -> BudgetRange:
    """Budgets from the base budget to all blocks of the sample."""
    base_LS = plan_settings.base_LS(coverage.layers, costs.lengths_tokens_S)
    observed_LS = coverage.observed_LS(costs.blocks_S)
    top_LS = np.where(observed_LS, np.maximum(costs.blocks_S, base_LS), base_LS)
    return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=top_LS)


def feasible_range(
    costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
) -> BudgetRange:
    """Budgets that keep coverage within the threshold of the base budget's."""
    raised = raised_range(costs, coverage, plan_settings)
    blocks_Z, size_S = np.unique(costs.blocks_S, return_inverse=True)
    floor_LS = least_feasible_budget(
        coverage,
        blocks_Z,
        plan_settings.base_L(coverage.layers),
        plan_settings.config.coverage_threshold,
    )[:, size_S]
    return replace(raised, floor_LS=np.where(costs.dense_LS, raised.base_LS, floor_LS))
