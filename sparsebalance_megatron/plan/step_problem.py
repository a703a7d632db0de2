# SPDX-License-Identifier: Apache-2.0
"""Inputs of a plan, and the questions that all parts of the planner ask about them."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.budgets.policy import (
    budget_problem,
    tune,
)
from sparsebalance_megatron.plan.budgets.problem import BudgetProblem
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job, check_cp_sizes
from sparsebalance_megatron.plan.search.balance import balanced
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import step_costs


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


@dataclass(frozen=True, kw_only=True)
class StepProblem(BudgetProblem):
    """A step to plan: its samples with all that they cost, and how to judge where they go.

    Its ``job`` is that of the inputs, or one of as many layers and samples that a search is for.
    """

    inputs: PlanInputs

    @classmethod
    def of(cls, inputs: PlanInputs) -> "StepProblem":
        """The problem that the inputs pose.

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
        lengths = inputs.lengths_tokens
        pinned_LS = _pinned(inputs.pinned_LS, job.layers, len(lengths))
        dense_LS = plan_settings.dense_LS(job.layers, lengths)
        if pinned_LS is not None:
            blocks_S = -(-np.array(lengths) // plan_settings.config.block_size)
            dense_LS &= (pinned_LS == 0) | (pinned_LS >= blocks_S)
        costs = step_costs(lengths, job, inputs.cost, inputs.scales, dense_LS)
        return cls(inputs=inputs, **vars(budget_problem(plan_settings, costs, coverage, pinned_LS)))

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
            return tune(self, where).budgets_LS
        except PlanError:
            return base_LS

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


def _pinned(pinned_LS: np.ndarray | None, layers: int, samples: int) -> np.ndarray | None:
    if pinned_LS is None or not pinned_LS.any():
        return None
    if pinned_LS.shape != (layers, samples):
        raise PlanError(
            f"pinned budgets have shape {pinned_LS.shape}, expected {(layers, samples)} (layers, "
            "samples)"
        )
    if ((pinned_LS > 0).any(axis=0) != (pinned_LS > 0).all(axis=0)).any() or pinned_LS.min() < 0:
        raise PlanError("pinned budgets: a sample's must be at least 1 in every layer, or 0 in all")
    return pinned_LS
