# SPDX-License-Identifier: Apache-2.0
"""Training in which every step belongs to one of several variants. Imports Megatron.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from end_to_end.attention import peer_layer_spec
from end_to_end.variants import StepOrder, Variant
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.inputs import Inputs
from sparsebalance_megatron.run.training_hooks import TrainingHooks


class PairedScheduler(Scheduler):
    """One scheduler per variant, each for its own steps.

    A variant plans from what was observed in its own steps, and learns from nothing else. Its
    scheduler counts global batches where Megatron counts steps.

    Args:
        order: which batch and variant a step trains.
        schedulers: one per variant.
        ranks_in_turn: data-parallel ranks that the plans are for and one process plays.

    ``coverage``, which the step log shows, is that of the last variant.
    """

    def __init__(
        self, order: StepOrder, schedulers: Sequence[Scheduler], ranks_in_turn: int
    ) -> None:
        last = schedulers[-1]
        job = in_one_rank(last.job, ranks_in_turn)
        super().__init__(last.planner, job, last.index, last.batch_sizes)
        self._order = order
        self._schedulers = schedulers
        self._ranks_in_turn = ranks_in_turn

    def planned(self, step: int) -> PlannedStep:
        planned = self._of(step).planned(self._order.batch(step))
        plan = replace(planned.plan, step=step)
        if self._ranks_in_turn > 1:
            plan = one_rank_after_another(plan)
            of_all = planned.scales.slowness_RP.mean(0, keepdims=True)
            scales = replace(planned.scales, slowness_RP=of_all)
            planned = replace(planned, scales=scales)
        return replace(planned, plan=plan)

    def follow(self, then: Callable[[PlannedStep], None]) -> None:
        """A variant's next plan is not the next step's."""

    def plan_following(self, step: int) -> None:
        self._of(step).plan_following(self._order.batch(step))

    def finish_step(self, step: int, measured: StepMeasurement) -> None:
        if self._ranks_in_turn > 1:
            measured = replace(
                measured,
                times_2RPVM=np.stack(
                    [by_rank(times, self._ranks_in_turn) for times in measured.times_2RPVM]
                ),
            )
        self._of(step).finish_step(self._order.batch(step), measured)

    def _of(self, step: int) -> Scheduler:
        return self._schedulers[self._order.variant(step)]


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """What a run of paired steps consists of."""

    order: StepOrder
    variants: Sequence[Variant]
    ranks_in_turn: int

    def is_dense(self, step: int) -> bool:
        return self.variants[self.order.variant(step)].dense


def paired_scheduler(pairing: Pairing, shared: Inputs) -> PairedScheduler:
    """One scheduler per variant, each with curves of its own."""
    host_job = shared.settings.host_job
    layout = over_ranks(host_job.layout, pairing.ranks_in_turn)
    settings = replace(shared.settings, host_job=replace(host_job, layout=layout))
    schedulers = []
    for variant in pairing.variants:
        given = shared.config
        config = replace(
            given,
            batching=variant.batching,
            tuning=variant.tuning,
            layer_budgets="dense:all" if variant.dense else given.layer_budgets,
            max_segments=given.max_segments if variant.segments else 1,
            window=variant.window,
            window_share=0.5,
        )
        max_cp_size = shared.plan_settings.max_cp_size if variant.shared else 1
        plan_settings = replace(shared.plan_settings, config=config, max_cp_size=max_cp_size)
        inputs = replace(shared, settings=settings, plan_settings=plan_settings)
        schedulers.append(inputs.from_step(0).scheduler())
    return PairedScheduler(pairing.order, schedulers, pairing.ranks_in_turn)


class PairedHooks(TrainingHooks):
    """The plugin's hooks with a paired scheduler, and attention that is dense where it must be."""

    def __init__(
        self, pairing: Pairing, arguments: Any, inputs: Inputs, device: torch.device
    ) -> None:
        super().__init__(arguments, inputs, device)
        self.run.make_scheduler = partial(paired_scheduler, pairing)
        options = AttentionOptions(inputs.config, inputs.grid)
        self.layer_spec = peer_layer_spec(options, pairing.is_dense)


def over_ranks(job: Any, ranks: int) -> Any:
    """The job's micro-batches, divided over ``ranks`` times as many data-parallel ranks."""
    return replace(
        job,
        data_parallel_size=job.data_parallel_size * ranks,
        micro_batches=job.micro_batches // ranks,
    )


def in_one_rank(job: Any, ranks: int) -> Any:
    """The inverse of :func:`over_ranks`."""
    return replace(
        job,
        data_parallel_size=job.data_parallel_size // ranks,
        micro_batches=job.micro_batches * ranks,
    )


def one_rank_after_another(plan: StepPlan) -> StepPlan:
    """All micro-batches on one rank: those of rank 0 first, then those of rank 1, and so on.

    The expectation keeps the makespan and the bounds of the ranks planned for.
    """
    micro_batches = tuple(
        replace(micro_batch, rank=0, position=position)
        for position, micro_batch in enumerate(plan.micro_batches)
    )
    joined = np.stack([_joined(times_RPVM) for times_RPVM in plan.expectation.times_2RPVM])
    expectation = replace(plan.expectation, times_2RPVM=joined)
    return replace(plan, data_parallel_size=1, micro_batches=micro_batches, expectation=expectation)


def _joined(times_RPVM: np.ndarray) -> np.ndarray:
    """[1, P, V, R * M], rank after rank."""
    stages, virtual_stages = times_RPVM.shape[1:3]
    return np.moveaxis(times_RPVM, 0, 2).reshape(1, stages, virtual_stages, -1)


def by_rank(times_1PVM: np.ndarray, ranks: int) -> np.ndarray:
    """[1, P, V, R * M] to [R, P, V, M]: the inverse of playing the ranks in turn."""
    _, stages, virtual_stages, _ = times_1PVM.shape
    return np.moveaxis(times_1PVM.reshape(stages, virtual_stages, ranks, -1), 2, 0)
