# SPDX-License-Identifier: Apache-2.0
"""A workload: global batches of a job, planned as training does, each step as its plan predicts.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.cost.memory import MemoryModel
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import StepPlan

COVERAGE_EXPONENT = 0.35

Balancer = Callable[[Sequence[float], Sequence[int], Job, int], Placement]
"""A function of samples' predicted ms and tokens, the job, and the cap of tokens."""


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
    """Global batches in order, on a job with its costs, its memory and the coverage to expect.

    Attributes:
        batches: lengths in tokens of every step's samples, alike in number.
        job: the layout, as many micro-batches a step as it may have.
        plan_settings: how steps are planned.
        memory: of the job; lists of blocks follow from plans.
        placed_by: another balancer, which places the samples of every step by their predicted ms
            at base budgets; None lets the plan place them.
    """

    batches: tuple[tuple[int, ...], ...]
    job: Job
    plan_settings: PlanSettings
    cost: CostModel
    coverage: CoverageCurves
    memory: MemoryModel
    placed_by: Balancer | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        job = self.job
        ranks = job.data_parallel_size * job.pipeline_stages
        return ranks * self.memory.shape.tensor_parallel_size

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
            plan_settings=self.plan_settings,
            cost=self.cost,
            coverage=copy.deepcopy(self.coverage),
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
            if self.placed_by is not None:
                placement = self.placed_by(
                    self._base_ms_S(batch),
                    batch,
                    self.job,
                    self.plan_settings.max_tokens_per_micro_batch,
                )
                job = replace(self.job, micro_batches=len(placement[0]))
                yield planner.plan(step, batch, job, planner.knowledge(), placement=placement)
                continue
            planned = scheduler.planned(step)
            scheduler.finish_step(step, self._as_predicted(batch, planned.plan))
            yield planned

    def _base_ms_S(self, batch: Sequence[int]) -> list[float]:
        """Predicted ms of every sample at its base budgets, on all chunks."""
        job, layers = self.job, self.job.layers
        scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
        dense_LS = self.plan_settings.dense_LS(layers, batch)
        costs = step_costs(batch, job, self.cost, scales, dense_LS)
        base_LS = self.plan_settings.base_LS(layers, batch)
        return list(costs.sample_ms(base_LS).sum(axis=(0, 2)).tolist())

    def _as_predicted(self, batch: Sequence[int], plan: StepPlan) -> StepMeasurement:
        """The measurement of a step that went as expected.

        No coverage curve is among it (all ``counts_LU`` are 0), so the curves stay those of the
        workload: what was only read off them is no new evidence for them.
        """
        expected, curves = plan.expectation, self.coverage
        blocks_S = -(-np.array(batch) // self.plan_settings.block_size)
        base_LS = self.plan_settings.base_LS(self.job.layers, batch)
        executed_LS, wanted_LS = (
            curves.coverage_LS(blocks_S, budgets_LS) for budgets_LS in (plan.budgets_LS, base_LS)
        )
        known_LS = ~np.isnan(executed_LS)
        tokens_LS = np.where(known_LS, batch, 0)
        executed_LS, wanted_LS = np.nan_to_num(executed_LS), np.nan_to_num(wanted_LS)
        return StepMeasurement(
            times_2RPVM=expected.times_2RPVM,
            schedule_ms=np.repeat(
                np.array(expected.rank_makespan_ms)[:, None], self.job.pipeline_stages, axis=1
            ),
            coverage=CoverageTotals(
                sums_LUK=np.zeros_like(curves.mean_LUK),
                counts_LU=np.zeros(curves.observed_LU.shape),
                counts_L=known_LS.sum(axis=1).astype(float),
                executed_L=executed_LS.sum(axis=1),
                executed_sum=float(executed_LS.sum()),
                base_sum=float(wanted_LS.sum()),
                count=float(known_LS.sum()),
                minimum=expected.coverage_min or 0.0,
                grown=0.0,
                tokens=float(tokens_LS.sum()),
                lost_tokens=float(((wanted_LS - executed_LS) * tokens_LS).sum()),
                lengths_3U=np.array(
                    [
                        np.bincount(length_bucket(blocks_S), of_LS.sum(axis=0), curves.buckets)
                        for of_LS in (executed_LS, wanted_LS, known_LS)
                    ]
                ),
            ),
            lm_loss=math.nan,
            tokens=sum(batch),
            differing_ranks=(),
        )


class _SampleOrder:
    """The samples of all batches, in order and then from the first again."""

    def __init__(self, batches: Sequence[tuple[int, ...]]) -> None:
        self._lengths_S = np.concatenate(batches)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size) % len(self._lengths_S)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return np.asarray(self._lengths_S[samples])
