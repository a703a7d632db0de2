# SPDX-License-Identifier: Apache-2.0
"""Which budgets the coverage threshold allows.

Shape legend: S samples, L layers, Z sizes (samples of as many blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import PlanPolicy


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


def feasible_range(costs: StepCosts, coverage: CoverageCurves, policy: PlanPolicy) -> BudgetRange:
    """Budgets that keep coverage within the policy's threshold of the base budget's."""
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
