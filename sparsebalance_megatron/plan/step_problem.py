# SPDX-License-Identifier: Apache-2.0
"""Inputs of a plan, and the questions that all parts of the planner ask about them."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.budgets.allowed import BudgetRange
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.balance import balanced
from sparsebalance_megatron.plan.segments import PlacedSegments
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import StepCosts, step_costs

ROUNDING = 1.0 + 1e-9
"""Relative tolerance above summation-order error."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Everything that a plan depends on.

    ``lengths_tokens``: of the step's samples, in order of arrival. ``coverage``, ``scales``: what
    has been learnt. ``placement``: where a host has placed the samples, [rank][position], or with
    cp_sizes; None lets the plan place them. ``pinned_LS``: budgets that are given, in whole
    columns; 0 lets the plan choose.
    """

    lengths_tokens: tuple[int, ...]
    job: Job
    plan_settings: PlanSettings
    cost: CostModel
    scales: StageScales
    coverage: CoverageCurves
    placement: Placement | Arrangement | None = None
    pinned_LS: np.ndarray | None = None


class BudgetPolicy:
    """Chooses budgets; this one keeps every sample's base budget."""

    def allowed(
        self, costs: StepCosts, coverage: CoverageCurves, plan_settings: PlanSettings
    ) -> BudgetRange:
        """Budgets that may be chosen."""
        base_LS = plan_settings.base_LS(coverage.layers, costs.lengths_tokens_S)
        return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=base_LS)

    def tuned_LS(self, problem: "StepProblem", where: Arrangement) -> np.ndarray:
        """Budgets of placed samples."""
        return problem.allowed.base_LS


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """A step to plan: its samples with all that they cost, and how to judge where they go.

    Its ``job`` is that of the inputs, or one of as many layers and samples that a search is for.
    ``allowed``: budgets that the policy may choose.
    """

    inputs: PlanInputs
    costs: StepCosts
    policy: BudgetPolicy
    allowed: BudgetRange

    @cached_property
    def of_groups(self) -> "StepProblem":
        """This step on the job whose ranks are its context-parallel groups."""
        costs = self.costs.of_groups
        return self if costs is self.costs else replace(self, costs=costs)

    def on_one_stage(self) -> "StepProblem":
        """This step with all layers on one stage, whose time is the sum over positions."""
        layers = tuple(range(self.job.layers))
        slowness_RP = self.costs.slowness_RP.max(axis=1, keepdims=True)
        costs = step_costs(
            self.lengths_tokens,
            replace(self.job, stage_layers=((layers,),)),
            self.inputs.cost,
            StageScales.of(np.ones((2, 1, 1)), slowness_RP),
            self.costs.dense_LS,
        )
        return replace(self, costs=costs)

    def with_positions(self, positions: int) -> "StepProblem":
        """This step with so many micro-batches on every rank."""
        if positions == self.job.micro_batches:
            return self
        job = replace(self.job, micro_batches=positions)
        return replace(self, costs=replace(self.costs, job=job))

    @property
    def job(self) -> Job:
        return self.costs.job

    @property
    def plan_settings(self) -> PlanSettings:
        return self.inputs.plan_settings

    @property
    def coverage(self) -> CoverageCurves:
        return self.inputs.coverage

    @property
    def pinned_S(self) -> np.ndarray:
        """Whose budgets are given and not to be chosen."""
        pinned_LS = self.inputs.pinned_LS
        return np.zeros(len(self.lengths_tokens), bool) if pinned_LS is None else pinned_LS[0] > 0

    @property
    def lengths_tokens(self) -> tuple[int, ...]:
        return self.inputs.lengths_tokens

    @property
    def cap_tokens(self) -> int:
        """Most tokens of a micro-batch that one rank of the job runs alone."""
        shared = self.inputs.job.context_parallel_size // self.job.context_parallel_size
        return self.plan_settings.max_tokens_per_micro_batch * shared

    @property
    def plans_positions(self) -> bool:
        """Whether this step may have fewer positions than the job."""
        return self.inputs.placement is None and self.plan_settings.plans_positions(self.job)

    @cached_property
    def expected_LS(self) -> np.ndarray:
        """Budgets to place by: base budgets, or what tuning makes of a first placement by them."""
        base_LS = self.allowed.base_LS
        if not self.plan_settings.tunes_by_latency:
            return base_LS
        try:
            where = Arrangement.of_placement(self.balanced_by(self.base_2SX))
            return self.policy.tuned_LS(self, where)
        except PlanError:
            return base_LS

    @cached_property
    def base_2SX(self) -> np.ndarray:
        """Ms of every sample at base budgets."""
        return self.costs.sample_ms(self.allowed.base_LS)

    @cached_property
    def expected_2SX(self) -> np.ndarray:
        """Ms of every sample at the expected budgets."""
        return self.sample_ms(self.expected_LS)

    def balanced_by(self, sample_2SX: np.ndarray) -> Placement:
        """Latency-balanced placement of samples that take so many ms."""
        return balanced(
            sample_2SX.sum(axis=0).sum(axis=1),
            self.lengths_tokens,
            self.job,
            self.cap_tokens,
            self.costs.slowness_R,
        )

    def search_ms(self, step_ms: float, share: float) -> float:
        """Ms of search: what the policy says, or a share of a step."""
        plan_ms = self.plan_settings.config.plan_ms
        return share * step_ms if plan_ms is None else plan_ms

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
