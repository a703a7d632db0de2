# SPDX-License-Identifier: Apache-2.0
"""The plugin's hooks with an arm's scheduler and attention. Imports Megatron.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from quality.arm_attention import Experiment, arm_layer_spec, executed_budgets
from quality.masked_attention import masked_attention
from quality.run_spec import RunSpec
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Part
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron import core_attention
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.run.inputs import Inputs
from sparsebalance_megatron.run.training_hooks import TrainingHooks


class ArmScheduler:
    """Stands in for :class:`Scheduler`: remembers executed budgets, and may replay others'.

    Args:
        rank: data-parallel rank, whose budgets it sees.
        replayed_TLS: executed budgets of another arm by step, layer and sample of the global batch;
            they go to other samples of the step, drawn anew for every step and layer.
        seed: of the draw, the same on all ranks.

    Attributes:
        executed_TLS: of this rank's samples, 0 elsewhere and where nothing was executed sparsely.
        lengths_TS: tokens of every sample of every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        experiment: Experiment,
        *,
        rank: int,
        steps: int,
        samples: int,
        replayed_TLS: np.ndarray | None,
        seed: int,
    ) -> None:
        self._scheduler = scheduler
        self._experiment = experiment
        self._rank = rank
        self._replayed_TLS = replayed_TLS
        self._seed = seed
        self._planned: PlannedStep | None = None
        self.job = scheduler.job
        self.coverage = scheduler.coverage
        self.executed_TLS = np.zeros((steps, scheduler.job.layers, samples), dtype=np.int16)
        self.lengths_TS = np.zeros((steps, samples), dtype=np.int32)

    def planned(self, step: int) -> PlannedStep:
        if self._planned is None or self._planned.plan.step != step:
            planned = self._scheduler.planned(step)
            if self._replayed_TLS is not None:
                planned = self._with_budgets(planned, self._replayed_TLS[step])
            self._planned = planned
            for micro_batch in planned.plan.micro_batches:
                self.lengths_TS[step, list(micro_batch.samples)] = micro_batch.lengths_tokens
        return self._planned

    def _with_budgets(self, planned: PlannedStep, budgets_LS: np.ndarray) -> PlannedStep:
        """The plan with a step's budgets permuted over its samples, layer by layer."""
        generator = np.random.default_rng([self._seed, planned.plan.step])
        permuted_LS = generator.permuted(budgets_LS, axis=1).astype(np.int32)

        def micro_batch_with(micro_batch: MicroBatchPlan) -> MicroBatchPlan:
            own_LS = np.ascontiguousarray(permuted_LS[:, list(micro_batch.samples)])
            own_LS.flags.writeable = False
            return replace(micro_batch, budgets_LS=own_LS)

        micro_batches = tuple(
            micro_batch_with(micro_batch) for micro_batch in planned.plan.micro_batches
        )
        return replace(planned, plan=replace(planned.plan, micro_batches=micro_batches))

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Nothing is planned ahead."""

    def plan_following(self, step: int) -> None:
        """Nothing is planned ahead."""

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._scheduler.state_dict()

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        (micro_batch,) = self.planned(step).plan.for_rank(self._rank).micro_batches
        budgets_LS = executed_budgets(self._experiment, micro_batch.budgets_LS)
        if budgets_LS is not None:
            self.executed_TLS[step][:, list(micro_batch.samples)] = budgets_LS
            self._experiment.executed.clear()
        self._scheduler.finish_step(step, measured)


class ArmHooks(TrainingHooks):
    """The plugin's hooks for one run.

    Attributes:
        model: what Megatron trains, once it has run a step.
        scheduler: the run's, once it has started.
    """

    model: Any
    scheduler: ArmScheduler

    def __init__(self, spec: RunSpec, arguments: Any, inputs: Inputs, device: torch.device) -> None:
        super().__init__(
            arguments, inputs, device, make_scheduler=partial(self._scheduler_of, spec)
        )
        arm, steps = spec.arm, spec.steps
        self.inputs = inputs
        self.device = device
        self.experiment = Experiment(
            is_dense=lambda step: arm.is_dense(step, steps), guarded=arm.replays is None
        )
        core_attention.block_sparse_attention = masked_attention  # type: ignore[assignment]
        options = AttentionOptions(inputs.config, inputs.grid)
        self.layer_spec = arm_layer_spec(options, self.experiment)
        plugin_step = self.forward_step

        def forward_step(data_iterator: Any, model: Any) -> Any:
            self.model = model
            return plugin_step(data_iterator, model)

        self.forward_step = forward_step

    def _scheduler_of(self, spec: RunSpec, inputs: Inputs) -> Any:
        costed = replace(
            inputs, cost=with_expensive_attention(inputs.cost, spec.study.attention_weight)
        )
        replayed = None
        if spec.replay is not None:
            replayed = np.load(spec.replay)["executed_TLS"]
        self.scheduler = ArmScheduler(
            costed.scheduler(),
            self.experiment,
            rank=torch.distributed.get_rank(),
            steps=spec.steps,
            samples=spec.study.batch_size,
            replayed_TLS=replayed,
            seed=spec.seed,
        )
        return self.scheduler


def with_expensive_attention(cost: CostModel, weight: float) -> CostModel:
    """A cost model in which a block pair takes ``weight`` times as long.

    Documents of a few hundred tokens spend little on attention; those of a long-context run spend
    most of their time on it, and only then does a planner move budgets.
    """

    def weighted(parts_ms: Any) -> dict[Part, tuple[float, ...]]:
        return parts_ms | {
            Part.ATTENTION: tuple(value * weight for value in parts_ms[Part.ATTENTION])
        }

    return replace(
        cost, forward_ms=weighted(cost.forward_ms), backward_ms=weighted(cost.backward_ms)
    )
