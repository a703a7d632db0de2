# SPDX-License-Identifier: Apache-2.0
"""A workload: global batches of a job, planned as training does, each step as its plan predicts.

Shape legend: L layers, S samples of a global batch.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.memory import MemoryModel
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.learn.batch_sizes import BatchSizes
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.learn.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.plan.step_plan import StepPlan

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


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out that costs are counted: predictions say whose times they take."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"no {flag_name('cost_table')}")
        yield


def memory_model(
    job: HostJob,
    config: SparseBalanceConfig,
    *,
    tied_embeddings: bool = False,
    sequence_parallel: bool = True,
    distributed_optimizer: bool = True,
    sharded_parameters: bool = False,
) -> MemoryModel:
    """Sizes that memory depends on besides plans."""
    layout = job.layout
    divides = distributed_optimizer or sharded_parameters
    return MemoryModel(
        shape=job.shape,
        layers_per_stage=tuple(sum(map(len, stage)) for stage in layout.stage_layers),
        virtual_stages=layout.virtual_stages,
        micro_batch_group_size=layout.micro_batch_group_size,
        tied_embeddings=tied_embeddings,
        sequence_parallel=sequence_parallel,
        optimizer_ranks=layout.data_parallel_size if divides else 1,
        expert_parallel_size=job.expert_parallel_size,
        sharded_parameters=sharded_parameters,
        recompute_all=job.recompute_all,
        recompute_attention=job.recompute_attention,
        attention_kept=config.recompute_attention == "keep",
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Global batches in order, on a job with its costs, its memory and the coverage to expect.

    Attributes:
        batches: lengths in tokens of every step's samples, alike in number.
        job: the layout, as many micro-batches a step as it may have.
        plan_settings: how steps are planned.
        memory: of the job; lists of blocks follow from plans.
    """

    batches: tuple[tuple[int, ...], ...]
    job: Job
    plan_settings: PlanSettings
    cost: CostModel
    coverage: CoverageCurves
    memory: MemoryModel

    @classmethod
    def of(
        cls,
        job: HostJob,
        config: SparseBalanceConfig,
        batches: Sequence[Sequence[int]],
        *,
        micro_batch_size: int = 1,
    ) -> Workload:
        """Global batches of a job that no flags describe.

        Args:
            micro_batch_size: samples of a micro-batch on average.
        """
        with without_warnings():
            cost = job.cost_model(config, {})
        config = with_dense_length(config, cost, job.padded(job.max_sample_tokens))
        return cls(
            batches=tuple(map(tuple, batches)),
            job=job.layout,
            plan_settings=job.plan_settings(config, micro_batch_size * job.max_sample_tokens),
            cost=cost,
            coverage=prior_coverage(job.layout.layers, job.coverage(config).grid[-1]),
            memory=memory_model(job, config),
        )

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        job = self.job
        ranks = job.data_parallel_size * job.pipeline_stages
        return ranks * self.memory.shape.tensor_parallel_size

    def planner(self, clock: Callable[[], float] = time.perf_counter) -> StepPlanner:
        """A planner that has learnt nothing yet but the coverage to expect."""
        return StepPlanner(
            job=self.job,
            plan_settings=self.plan_settings,
            cost=self.cost,
            coverage=copy.deepcopy(self.coverage),
            calibrate="off",
            clock=clock,
        )

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
        scheduler = Scheduler(
            self.planner(clock),
            job=self.job,
            index=_SampleOrder(self.batches),
            batch_sizes=BatchSizes.constant(len(self.batches[0])),
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
