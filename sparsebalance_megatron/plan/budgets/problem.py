# SPDX-License-Identifier: Apache-2.0
"""Inputs of a choice of budgets, and the budgets that the coverage threshold allows.

Shape legend: Z sizes (samples of as many blocks).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.segments import PlacedSegments
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import StepCosts

ROUNDING = 1.0 + 1e-9
"""Relative tolerance above summation-order error."""


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


@dataclass(frozen=True, kw_only=True)
class BudgetProblem:
    """Samples whose budgets are to be chosen: the policy, their costs, coverage and limits.

    ``pinned_S``: whose budgets are given and not to be chosen.
    """

    plan_settings: PlanSettings
    costs: StepCosts
    coverage: CoverageCurves
    allowed: BudgetRange
    pinned_S: np.ndarray

    @property
    def job(self) -> Job:
        return self.costs.job

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

    @cached_property
    def base_2SX(self) -> np.ndarray:
        """Ms of every sample at base budgets."""
        return self.costs.sample_ms(self.allowed.base_LS)

    def sample_ms(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Ms of every sample at these budgets."""
        at_base = budgets_LS is self.allowed.base_LS
        return self.base_2SX if at_base else self.costs.sample_ms(budgets_LS)

    def micro_batch_ms(self, budgets_LS: np.ndarray, where: Arrangement) -> OperationTimes:
        """Times of the micro-batches of placed samples."""
        return self.costs.micro_batch_ms(self.sample_ms(budgets_LS), where)

    def makespans_ms(self, budgets_LS: np.ndarray, where: Arrangement) -> np.ndarray:
        """[E] ms until the last operation of each lockstep group ends; a rank alone is one."""
        if where.segment_starts_blocks:
            placed = PlacedSegments(self.costs, where)
            return makespans_ms(placed.times(placed.ms(budgets_LS)))
        return makespans_ms(self.micro_batch_ms(budgets_LS, where))
