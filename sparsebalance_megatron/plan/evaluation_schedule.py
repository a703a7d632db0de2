# SPDX-License-Identifier: Apache-2.0
"""Plans of evaluation steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy
from sparsebalance_megatron.plan.step_problem import PlanInputs
from sparsebalance_megatron.plan.step_samples import SampleLengths


@dataclass(kw_only=True)
class EvaluationSchedule:
    """Plans of evaluation steps: order of arrival, never tuned, so that losses are comparable.

    ``dense``: budgets cover all blocks of the longest sample, instead of the base budgets.
    """

    job: JobShape
    policy: PlanPolicy
    cost: CostModel
    coverage: CoverageCurves
    index: SampleLengths
    global_batch_size: int
    dense: bool

    def planned(self, step: int) -> PlannedStep:
        """The plan of evaluation step ``step``."""
        size = self.global_batch_size
        base_budget = self.coverage.max_blocks if self.dense else self.policy.base_budget
        samples = self.index.global_batch(step * size, size)
        inputs = PlanInputs(
            lengths_tokens=tuple(self.index.lengths_of(samples).tolist()),
            job=self.job,
            policy=replace(self.policy, batching="arrival", tuning="off", base_budget=base_budget),
            cost=self.cost,
            scales=StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages),
            coverage=self.coverage,
        )
        return PlannedStep(
            plan=plan_step(step, inputs),
            samples=samples,
            scales=inputs.scales,
            plan_ms=0.0,
            wait_ms=0.0,
        )

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Nothing is planned ahead."""
