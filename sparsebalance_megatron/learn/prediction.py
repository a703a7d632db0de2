# SPDX-License-Identifier: Apache-2.0
"""Predicts steps: plans them as training does, and takes each to go as its plan predicts.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsebalance_megatron.cost.memory import (
    MemoryModel,
    SegmentTokens,
    StageMemory,
    stage_memory,
)
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.cost.work_model import work_model_named
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.step_plan import PlanPolicy, StepPlan

COVERAGE_EXPONENT = 0.35


def prior_coverage(layers: int, max_blocks: int) -> CoverageCurves:
    """Coverage (k / n)^0.35 of n blocks at budget k, alike in all layers; no measurement.

    A length bucket holds the curve of the geometric middle of its lengths.
    """
    curves = CoverageCurves(layers, max_blocks, 0.0)
    middle_U = 2.0 ** (np.arange(curves.buckets) + 0.5)
    curve_UK = np.minimum(np.asarray(curves.grid) / middle_U[:, None], 1.0) ** COVERAGE_EXPONENT
    counts_LU = np.ones_like(curves.observed_LU, dtype=np.float64)
    curves.observe(np.broadcast_to(curve_UK, curves.mean_LUK.shape), counts_LU)
    return curves


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Global batches in order, on a job with its costs and the coverage to expect.

    ``batches``: lengths in tokens of every step's samples, alike in number.
    """

    batches: tuple[tuple[int, ...], ...]
    job: Job
    policy: PlanPolicy
    cost: CostModel
    coverage: CoverageCurves

    def planned_steps(
        self, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[PlannedStep]:
        """One step per batch, in order.

        A :class:`.Scheduler` plans each step when it begins, and learns that the step before it
        took what was predicted and reached the coverage that was expected.

        Args:
            clock: seconds, for the time that planning takes.

        Raises:
            PlanError: a batch has no placement under the policy's cap.
        """
        batch_size = len(self.batches[0])
        planner = StepPlanner(
            job=self.job,
            policy=self.policy,
            cost=self.cost,
            coverage=copy.deepcopy(self.coverage),
            global_batch_size=batch_size,
            calibrate="off",
            clock=clock,
        )
        scheduler = Scheduler(
            planner,
            job=self.job,
            index=_SampleOrder(self.batches),
            batch_sizes=BatchSizes.constant(batch_size),
        )
        for step, batch in enumerate(self.batches):
            planned = scheduler.planned(step)
            scheduler.finish_step(step, self._as_predicted(batch, planned.plan))
            yield planned

    def _as_predicted(self, batch: Sequence[int], plan: StepPlan) -> StepMeasurement:
        """The measurement of a step that went as expected.

        No coverage curve is among it (all ``counts_LU`` are 0), so the curves stay those of the
        workload: what was only read off them is no new evidence for them.
        """
        expected, curves, layers = plan.expectation, self.coverage, self.job.layers
        samples = float(layers * len(batch)) if expected.coverage_mean is not None else 0.0
        tokens = float(sum(batch) * layers) if samples else 0.0
        executed_mean = expected.coverage_mean or 0.0
        base_mean = self._base_coverage(batch) if samples else 0.0
        return StepMeasurement(
            times_2RPVM=expected.times_2RPVM,
            schedule_ms=np.repeat(
                np.array(expected.rank_makespan_ms)[:, None], self.job.pipeline_stages, axis=1
            ),
            coverage=CoverageTotals(
                sums_LUK=np.zeros_like(curves.mean_LUK),
                counts_LU=np.zeros(curves.observed_LU.shape),
                counts_L=np.full(layers, samples / layers),
                executed_L=np.full(layers, executed_mean * len(batch)),
                executed_sum=executed_mean * samples,
                base_sum=base_mean * samples,
                count=samples,
                minimum=expected.coverage_min or 0.0,
                grown=0.0,
                tokens=tokens,
                lost_tokens=(base_mean - executed_mean) * tokens,
            ),
            lm_loss=math.nan,
            tokens=sum(batch),
            differing_ranks=(),
        )

    def _base_coverage(self, batch: Sequence[int]) -> float:
        """Mean over the samples and layers whose curves are known."""
        blocks_S = -(-np.array(batch) // self.policy.block_size)
        base_LS = np.minimum(self.policy.base_L(self.job.layers)[:, None], blocks_S)
        return float(np.nanmean(self.coverage.coverage_LS(blocks_S, base_LS)))


class _SampleOrder:
    """The samples of all batches, in order and then from the first again."""

    def __init__(self, batches: Sequence[tuple[int, ...]]) -> None:
        self._lengths_S = np.concatenate(batches)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size) % len(self._lengths_S)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return np.asarray(self._lengths_S[samples])


def planned_memory(
    plans: Sequence[StepPlan],
    job: Job,
    shape: ModelShape,
    *,
    selection: str,
    block_size: int,
    dense_L: np.ndarray,
    **model: Any,
) -> tuple[StageMemory, ...]:
    """Memory of every pipeline stage in the step that needs most of it.

    Args:
        dense_L: which layers are dense.
        model: the fields of :class:`.MemoryModel` that neither the job nor the plans say.
    """
    layers_P = [[layer for chunk in stage for layer in chunk] for stage in job.stage_layers]
    memory = MemoryModel(
        shape=shape,
        layers_per_stage=tuple(map(len, layers_P)),
        virtual_stages=job.virtual_stages,
        micro_batch_group_size=job.micro_batch_group_size,
        selected_blocks_per_token=0.0,
        **model,
    )
    steps = []
    for plan in plans:
        most_L = np.max([each.budgets_LS.max(axis=1) for each in plan.micro_batches], axis=0)
        of_sparse = work_model_named(selection).list_entries_per_token(
            heads=shape.num_attention_heads,
            groups=shape.num_query_groups,
            block_size=block_size,
            budget_blocks=int(most_L[~dense_L].max(initial=1)),
        )
        # A dense layer lists all blocks for each block of queries and KV head.
        of_dense = shape.num_query_groups * int(most_L[dense_L].max(initial=0)) / block_size
        entries_L = np.where(dense_L, of_dense, of_sparse)
        held = _tokens_held(plan, job, block_size)
        lists_P = [float(entries_L[own].mean()) if own else 0.0 for own in layers_P]
        steps.append(
            [
                stage_memory(replace(memory, selected_blocks_per_token=lists), *held)[stage]
                for stage, lists in enumerate(lists_P)
            ]
        )
    return tuple(
        max(of_stage, key=lambda each: each.total_bytes) for of_stage in zip(*steps, strict=True)
    )


def _tokens_held(
    plan: StepPlan, job: Job, block_size: int
) -> tuple[np.ndarray, SegmentTokens | None]:
    """Tokens of micro-batches by rank and position, and of segments where a step has them."""
    tokens_RM = plan.rank_tokens_RM()
    if all(micro_batch.segments == 1 for micro_batch in plan.micro_batches):
        return tokens_RM, None
    of_ranks = [
        [each.segment_tokens(block_size) for each in plan.for_rank(rank).micro_batches]
        for rank in range(plan.data_parallel_size)
    ]
    stages = job.pipeline_stages
    return tokens_RM, SegmentTokens(
        in_flight_P=tuple(
            float(max(most_tokens_in_flight(tokens_MU, stages - stage) for tokens_MU in of_ranks))
            for stage in range(stages)
        ),
        largest=float(max(tokens_U.max() for tokens_MU in of_ranks for tokens_U in tokens_MU)),
        longest=float(max(each.tokens for each in plan.micro_batches if each.segments > 1)),
    )
