# SPDX-License-Identifier: Apache-2.0
"""Inputs of a choice of budgets, and the budgets that the coverage threshold allows.

Shape legend: S samples, L layers, Z sizes (samples of as many blocks), B means that are held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.lockstep_times import group_times
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
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

    def of(self, samples: slice) -> BudgetRange:
        """The part that is about some of the samples."""
        return BudgetRange(
            floor_LS=self.floor_LS[:, samples],
            base_LS=self.base_LS[:, samples],
            top_LS=self.top_LS[:, samples],
        )

    def pinned(self, pinned_LS: np.ndarray) -> BudgetRange:
        """This range, but pinned budgets, above 0, allow no others and stand for base budgets."""
        floor_LS, base_LS, top_LS = (
            np.where(pinned_LS > 0, pinned_LS, limit_LS)
            for limit_LS in (self.floor_LS, self.base_LS, self.top_LS)
        )
        return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)


def feasible_range(
    costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
) -> BudgetRange:
    """Budgets that keep coverage within the policy's threshold of the base budget's."""
    base_LS = base_budgets_LS(costs, coverage, plan_settings)
    blocks_Z, size_S = np.unique(costs.blocks_S, return_inverse=True)
    floor_LS = least_feasible_budget(
        coverage, blocks_Z, plan_settings.base_L(coverage.layers), plan_settings.coverage_threshold
    )[:, size_S]
    floor_LS = np.where(costs.dense_LS, base_LS, floor_LS)
    observed_LS = coverage.observed_LS(costs.blocks_S)
    top_LS = np.where(observed_LS & ~costs.dense_LS, np.maximum(costs.blocks_S, base_LS), base_LS)
    return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)


def base_budgets_LS(
    costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
) -> np.ndarray:
    """Base budgets, no more than a sample has blocks."""
    return plan_settings.base_LS(coverage.layers, costs.lengths_tokens_S)


@dataclass(frozen=True, kw_only=True)
class BudgetProblem:
    """Samples whose budgets are to be chosen: the policy, their costs, coverage and limits.

    ``weight_S``: what a sample's coverage counts in sums: 1, its tokens, or the worth of its mean.
    ``mean_S``: which mean it belongs to. ``worth_B``: of coverage in each.
    ``pinned_S``: whose budgets are given and not to be chosen.
    """

    plan_settings: PlanSettings
    costs: StepCosts
    coverage: CoverageCurves
    allowed: BudgetRange
    weight_S: np.ndarray
    mean_S: np.ndarray
    worth_B: np.ndarray
    pinned_S: np.ndarray

    def of(self, samples: slice) -> BudgetProblem:
        """The part that is about some of the samples."""
        return replace(
            self,
            costs=self.costs.of(samples),
            allowed=self.allowed.of(samples),
            weight_S=self.weight_S[samples],
            mean_S=self.mean_S[samples],
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

    def covered_B(self, budgets_LS: np.ndarray) -> np.ndarray:
        """:meth:`covered` by the samples of every mean."""
        covered_S = np.nansum(self.coverage_LS(budgets_LS) * self.weight_S, axis=0)
        return np.bincount(self.mean_S, covered_S, len(self.worth_B))

    def covers(self, budgets_LS: np.ndarray, wanted_coverage: float | np.ndarray) -> bool:
        """Whether :meth:`covered` is at least what is wanted, or :meth:`covered_B` that of each."""
        covered = self.covered_B if np.ndim(wanted_coverage) else self.covered
        return bool(np.all(covered(budgets_LS) * ROUNDING >= wanted_coverage))

    def stuck_S(self, budgets_LS: np.ndarray) -> np.ndarray:
        """Whether all layers that have a choice lie at their floors, [S]."""
        low_LS = (budgets_LS == self.allowed.floor_LS) & (budgets_LS < self.allowed.top_LS)
        return np.asarray((low_LS | self.costs.dense_LS).all(axis=0) & low_LS.any(axis=0))

    def micro_batch_ms(self, budgets_LS: np.ndarray, where: Arrangement) -> OperationTimes:
        """Times of the micro-batches of placed samples."""
        if self.costs.job.lockstep_ranks > 1:
            return group_times(self.costs, budgets_LS, where)
        return self.costs.micro_batch_ms(self.costs.sample_ms(budgets_LS), where)

    def even_ms(self, where: Arrangement) -> float:
        """Makespan if work at base budgets were the same on all ranks and in all micro-batches."""
        sample_2SC = self.costs.sample_ms(self.allowed.base_LS)
        times_2RPVM = self.costs.micro_batch_ms(sample_2SC, where).by_micro_batch_2RPVM
        mean_2RPVM = times_2RPVM.mean(axis=(1, 4), keepdims=True)
        positions = times_2RPVM.shape[-1]
        even = OperationTimes.of_micro_batches(
            np.repeat(mean_2RPVM, positions, axis=4),
            unshared(1, positions),
            self.costs.job.schedule,
        )
        return float(makespans_ms(even).max())

    def makespans_ms(self, budgets_LS: np.ndarray, where: Arrangement) -> np.ndarray:
        """[R] ms until the last operation of each rank, or of its lockstep group, ends."""
        return makespans_ms(self.micro_batch_ms(budgets_LS, where))
