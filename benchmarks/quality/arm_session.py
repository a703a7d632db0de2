# SPDX-License-Identifier: Apache-2.0
"""The plugin's hooks with an arm's scheduler and attention. Imports Megatron.

Shape legend: T steps, L layers, S samples of a global batch, X places found.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from end_to_end.attention import peer_layer_spec

from quality.arms import Arm
from quality.masked_attention import masked_attention
from quality.run_spec import RunSpec
from quality.scoring import READS_ALL
from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.cost.parts import Part
from sparsebalance_megatron.learn.dealt_samples import DealtSamples, Window
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron import core_attention
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan
from sparsebalance_megatron.plan.windows import Windows
from sparsebalance_megatron.run.inputs import Inputs
from sparsebalance_megatron.run.training_hooks import TrainingHooks

Change = Callable[[int, np.ndarray], np.ndarray]
"""Gives a step's budgets [L, S], in order of arrival, in place of the planned ones."""


JITTERED_PAIRS = 2
"""Pairs of samples of a step: one with a block more, one with a block less."""
RELATIVE_CHANGE = 1e-3
"""Relative change of initial weights."""


class ArmScheduler(Scheduler):
    """Remembers executed budgets, and may change those that another scheduler plans.

    Args:
        reads_all: whether a step is dense.
        rank: data-parallel rank, whose budgets it sees.
        alone: whether this process computes the micro-batches of all planned ranks, as one.
        change: of planned budgets, the same on all ranks; None leaves them.

    Attributes:
        executed_TLS: of this rank's samples, 0 elsewhere and where nothing was executed sparsely.
        lengths_TS: tokens of every sample of every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        reads_all: Callable[[int], bool],
        rank: int,
        steps: int,
        samples: int,
        alone: bool,
        change: Change | None,
    ) -> None:
        job = replace(scheduler.job, data_parallel_size=1) if alone else scheduler.job
        super().__init__(scheduler.planner, job, scheduler.index, scheduler.batch_sizes)
        self._scheduler = scheduler
        self._reads_all = reads_all
        self._rank = rank
        self._alone = alone
        self._change = change
        self._latest: PlannedStep | None = None
        self.executed_TLS = np.zeros((steps, scheduler.job.layers, samples), dtype=np.int16)
        self.lengths_TS = np.zeros((steps, samples), dtype=np.int32)

    def planned(self, step: int) -> PlannedStep:
        if self._latest is None or self._latest.plan.step != step:
            planned = self._scheduler.planned(step)
            if self._change is not None:
                planned = with_budgets(planned, self._change(step, planned.plan.budgets_LS))
            if self._alone:
                scales = StageScales.of(planned.scales.scales_2PV)
                planned = replace(planned, plan=on_one_rank(planned.plan), scales=scales)
            self._latest = planned
            for micro_batch in planned.plan.micro_batches:
                self.lengths_TS[step, list(micro_batch.samples)] = micro_batch.lengths_tokens
        return self._latest

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """Nothing is planned ahead."""

    def plan_following(self, step: int) -> None:
        """Nothing is planned ahead."""

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._scheduler.state_dict()

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        (micro_batch,) = self.planned(step).plan.for_rank(self._rank).micro_batches
        if not self._reads_all(step):
            self.executed_TLS[step][:, list(micro_batch.samples)] = micro_batch.budgets_LS
        self._scheduler.finish_step(step, measured)


def with_budgets(planned: PlannedStep, budgets_LS: np.ndarray) -> PlannedStep:
    """The step with these budgets, in order of arrival."""

    def micro_batch_with(micro_batch: MicroBatchPlan) -> MicroBatchPlan:
        own_LS = np.ascontiguousarray(budgets_LS[:, list(micro_batch.samples)], dtype=np.int32)
        own_LS.flags.writeable = False
        return replace(micro_batch, budgets_LS=own_LS)

    micro_batches = tuple(map(micro_batch_with, planned.plan.micro_batches))
    return replace(planned, plan=replace(planned.plan, micro_batches=micro_batches))


def on_one_rank(plan: StepPlan) -> StepPlan:
    """A plan in which one rank computes, as one micro-batch, those of all ranks in their order.

    The predicted makespan stays that of the ranks.
    """
    parts = sorted(plan.micro_batches, key=lambda each: (each.rank, each.position))
    budgets_LS = np.concatenate([each.budgets_LS for each in parts], axis=1)
    budgets_LS.flags.writeable = False
    dense_ML = np.array([each.dense_documents_L for each in parts])
    # Of a micro-batch behind one that is not wholly dense, no document is.
    whole_ML = dense_ML == [[len(each.samples)] for each in parts]
    dense_ML[1:] *= np.cumprod(whole_ML, axis=0)[:-1]
    whole = MicroBatchPlan(
        samples=tuple(sample for each in parts for sample in each.samples),
        lengths_tokens=tuple(length for each in parts for length in each.lengths_tokens),
        budgets_LS=budgets_LS,
        rank=0,
        position=0,
        dense_documents_L=dense_ML.sum(axis=0),
    )
    expected = plan.expectation
    expected = replace(
        expected,
        rank_makespan_ms=(expected.makespan_ms,),
        times_2RPVM=expected.times_2RPVM.sum(axis=(1, 4), keepdims=True),
    )
    return replace(plan, data_parallel_size=1, micro_batches=(whole,), expectation=expected)


class RandomWindows(DealtSamples):
    """Windows whose samples are dealt to steps at random."""

    def _deal(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        samples_WI, places_WI = super()._deal(window)
        drawn_WI = (
            np.random.default_rng([self.windows.seed, window.first_step])
            .permuted(places_WI.ravel())
            .reshape(places_WI.shape)
        )
        samples_S = np.empty_like(samples_WI.ravel())
        samples_S[places_WI.ravel()] = samples_WI.ravel()
        return samples_S[drawn_WI], drawn_WI


def order_of(arm: Arm, inputs: Inputs) -> DealtSamples | None:
    """The order of an arm's samples; None is that of arrival."""
    if arm.window == 1:
        return None
    settings, kind = inputs.settings, RandomWindows if arm.at_random else DealtSamples
    windows = Windows(arm.window, arm.window_share, settings.seed)
    sizes, warm_up_samples = settings.batch_sizes, settings.warm_up_samples
    return kind.from_step(inputs.train, sizes, windows, step=0, warm_up_samples=warm_up_samples)


class WeightAverage:
    """The mean of the weights of a run's last steps."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, model: Any) -> None:
        """Count the weights as they are."""
        weights = [weight.double() for weight in model.parameters()]
        sums = self._sums or [torch.zeros_like(weight) for weight in weights]
        self._sums = [total + weight for total, weight in zip(sums, weights, strict=True)]
        self._count += 1

    @torch.no_grad()
    def put_into(self, model: Any) -> None:
        """Set the weights to the mean, if any were counted."""
        for weight, total in zip(model.parameters(), self._sums, strict=bool(self._sums)):
            weight.copy_(total / self._count)


@torch.no_grad()
def change_weights(model: Any, *, seed: int) -> None:
    """Change every weight by about ``RELATIVE_CHANGE`` of itself: the experiment once more."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.mul_(1.0 + RELATIVE_CHANGE * torch.randn(weight.shape, generator=generator))


class ArmHooks(TrainingHooks):
    """The plugin's hooks for one run.

    Attributes:
        model: what Megatron trains, once it has run a step.
        scheduler: the run's, once it has started.
        average: of the weights before each of the last steps.
    """

    model: Any
    scheduler: ArmScheduler

    def __init__(self, spec: RunSpec, arguments: Any, inputs: Inputs, device: torch.device) -> None:
        super().__init__(arguments, inputs, device)
        self.run.make_scheduler = partial(self._scheduler_of, spec)
        arm, steps = spec.arm, spec.steps
        self.inputs = inputs
        self._arm = arm
        self.device = device
        core_attention.block_sparse_attention = masked_attention  # type: ignore[assignment]
        options = AttentionOptions(inputs.config, inputs.grid)
        arm_spec = peer_layer_spec(options, self._reads_all)

        def layer_spec(*model_arguments: Any) -> Any:
            # Megatron has drawn random numbers before it builds a model: as many as a micro-batch
            # has tokens, so that initial weights would follow its size.
            torch.manual_seed(spec.model_seed)
            return arm_spec(*model_arguments)

        self.layer_spec = layer_spec
        plugin_step = self.forward_step
        self.average = WeightAverage()
        begun = 0

        def forward_step(data_iterator: Any, model: Any) -> Any:
            nonlocal begun
            self.model = model
            if begun == 0 and arm.repetition:
                change_weights(model, seed=arm.repetition)
            if begun >= steps * (1.0 - spec.study.averaged_share):
                self.average.add(model)
            begun += 1
            return plugin_step(data_iterator, model)

        self.forward_step = forward_step

    def _reads_all(self, step: int) -> bool:
        return step == READS_ALL or (step >= 0 and self._arm.dense)

    def _scheduler_of(self, spec: RunSpec, inputs: Inputs) -> Scheduler:
        host_job, ranks = inputs.settings.host_job, spec.study.planned_ranks
        layout = replace(host_job.layout, data_parallel_size=ranks)
        cap_tokens = inputs.plan_settings.max_tokens_per_micro_batch * spec.ranks // ranks
        planned = replace(
            inputs,
            settings=replace(inputs.settings, host_job=replace(host_job, layout=layout)),
            plan_settings=replace(inputs.plan_settings, max_tokens_per_micro_batch=cap_tokens),
            cost=with_expensive_attention(inputs.cost, spec.study.attention_weight),
            dealt=order_of(spec.arm, inputs),
        )
        self.scheduler = ArmScheduler(
            planned.scheduler(),
            reads_all=self._reads_all,
            rank=torch.distributed.get_rank(),
            steps=spec.steps,
            samples=spec.study.batch_size,
            alone=spec.ranks < ranks,
            change=change_of(spec),
        )
        return self.scheduler


def change_of(spec: RunSpec) -> Change | None:
    """What an arm does to planned budgets; drawn from the seed, the same on all ranks."""
    arm = spec.arm

    def jittered(step: int, planned_LS: np.ndarray) -> np.ndarray:
        generator = np.random.default_rng([spec.seed, step])
        up_and_down = np.zeros(planned_LS.shape[1], dtype=np.int32)
        up_and_down[: 2 * JITTERED_PAIRS] = [1, -1] * JITTERED_PAIRS
        return planned_LS + generator.permutation(up_and_down)

    def alternating(step: int, planned_LS: np.ndarray) -> np.ndarray:
        blocks = spec.study.equal_speed_blocks
        budget = int((step + 1) * blocks) - int(step * blocks)
        return np.full_like(planned_LS, budget)

    if arm.replays is not None:
        assert spec.replay is not None
        found = np.load(spec.replay)
        executed_TLS = found["executed_TLS"]
        return lambda step, planned_LS: np.random.default_rng([spec.seed, step]).permuted(
            executed_TLS[step], axis=1
        )
    if arm.jitter:
        return jittered
    return alternating if arm.equal_speed else None


def with_expensive_attention(cost: CostModel, weight: float) -> CostModel:
    """A cost model in which a block pair takes ``weight`` times as long.

    Documents of a few hundred tokens spend little on attention; those of a long-context run spend
    most of their time on it, and only then does a planner move budgets.
    """

    ms_per_unit = {
        timed: tuple((weight if timed[0] is Part.ATTENTION else 1.0) * value for value in row)
        for timed, row in cost.ms_per_unit.items()
    }
    return replace(cost, ms_per_unit=ms_per_unit)
