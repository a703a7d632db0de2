# SPDX-License-Identifier: Apache-2.0
"""Makes the records of a run from what was planned and measured.

Shape legend: R data-parallel ranks, P pipeline stages, L layers, U length buckets, K budgets of the
grid, S samples of a micro-batch, O rows of observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from sparsebalance_megatron.learn.measurement import (
    Piece,
    RankPlace,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.records import (
    CoverageRecord,
    DataSource,
    Measured,
    Predicted,
    RankHeader,
    RankMicroBatch,
    RankStep,
    Recompute,
    RunHeader,
    StepCoverage,
    StepRecord,
)
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms
from sparsebalance_megatron.plan.pipeline.orders import schedule_name
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan

_MS_DIGITS = 4
_COVERAGE_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What is known of a step at its end, of all ranks; nothing in it changes afterwards.

    ``iteration_ms`` is None in the first step of a process. ``host_ms`` is that of the rank which
    writes (:class:`.timing.HostTime`).
    """

    iteration: int
    iteration_ms: float | None
    planned: PlannedStep
    measured: StepMeasurement
    padded_tokens: int
    host_ms: Mapping[str, float]


def run_header(
    *, job: Job, sources: Sequence[Mapping[str, Any]] = (), **settings: Any
) -> RunHeader:
    """The first line of the step log.

    Args:
        sources: the data sets that the run mixes; none where there is but one.
        settings: other fields of :class:`.records.RunHeader`.
    """
    group_size = job.micro_batch_group_size
    return RunHeader(
        data_parallel_size=job.data_parallel_size,
        pipeline_stages=job.pipeline_stages,
        virtual_stages=job.virtual_stages,
        micro_batches=job.micro_batches,
        layers=job.layers,
        stage_layers=job.stage_layers,
        schedule=schedule_name(job.pipeline_stages, job.virtual_stages),
        micro_batch_group_size=UNSET if group_size is None else group_size,
        sources=tuple(DataSource(**source) for source in sources) or UNSET,
        **settings,
    )


def step_record(step: FinishedStep) -> StepRecord:
    """A step of all ranks."""
    planned, measured, coverage = step.planned, step.measured, step.measured.coverage
    expectation = planned.plan.expectation
    work_RPVM = measured.times_2RPVM[0] + measured.times_2RPVM[1]
    return StepRecord(
        iteration=step.iteration,
        iteration_ms=step.iteration_ms,
        lm_loss=measured.lm_loss,
        plan_ms=planned.plan_ms,
        host_ms=dict(step.host_ms),
        plan_wait_ms=planned.wait_ms,
        batching=planned.plan.batching,
        widths=_widths_if_shared(planned.plan),
        predicted=Predicted(
            makespan_ms=expectation.makespan_ms,
            lower_bound_ms=expectation.lower_bound_ms,
            rank_makespan_ms=tuple(expectation.rank_makespan_ms),
            forward_ms=expectation.times_2RPVM[0],
            backward_ms=expectation.times_2RPVM[1],
            rank_busy_ms=rank_busy_ms(expectation.times_2RPVM).tolist(),
            imbalance_micro_batches=expectation.imbalance_micro_batches,
            imbalance_rank_sums=expectation.imbalance_rank_sums,
            imbalance_makespans=expectation.imbalance_makespans,
            work_ratio=expectation.work_ratio,
            samples_cut=expectation.samples_cut,
            samples_raised=expectation.samples_raised,
            samples_clamped=expectation.samples_clamped,
            device_slowness=_unless_alike(planned.scales.device_slowness_RP),
        ),
        measured=Measured(
            forward_ms=measured.times_2RPVM[0],
            backward_ms=measured.times_2RPVM[1],
            rank_busy_ms=rank_busy_ms(measured.times_2RPVM).tolist(),
            schedule_ms=measured.schedule_ms.tolist(),
            imbalance_rank_sums=imbalance(work_RPVM.sum(axis=(1, 2, 3))),
            imbalance_micro_batches=imbalance(work_RPVM.sum(axis=(1, 2))),
        ),
        coverage=StepCoverage(
            mean=coverage.executed_mean,
            min=coverage.minimum,
            base_mean=coverage.base_mean,
            unobserved=coverage.unobserved,
            lost_by_token=coverage.lost_by_token,
        ),
        guarded_samples=int(coverage.grown),
        tokens=measured.tokens,
        padded_tokens=step.padded_tokens,
        recompute=Recompute(**measured.recompute._asdict()),
        segments=_segments(planned.plan) if planned.in_segments else UNSET,
    )


def _unless_alike(slowness_RP: np.ndarray) -> Any:
    return None if (slowness_RP == 1.0).all() else slowness_RP.tolist()


def _widths_if_shared(plan: StepPlan) -> tuple[tuple[int, ...], ...] | None:
    if all(micro_batch.cp_size == 1 for micro_batch in plan.micro_batches):
        return None
    return tuple(
        tuple(micro_batch.cp_size for micro_batch in plan.for_rank(rank).micro_batches)
        for rank in range(plan.data_parallel_size)
    )


def _segments(plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(micro_batch.segments for micro_batch in plan.for_rank(rank).micro_batches)
        for rank in range(plan.data_parallel_size)
    )


def coverage_record(
    *, iteration: int, grid: tuple[int, ...], mean_LUK: np.ndarray, observed_LU: np.ndarray
) -> CoverageRecord:
    """The coverage curves as they stand."""
    rounded = np.round(mean_LUK, _COVERAGE_DIGITS).tolist()
    return CoverageRecord(
        iteration=iteration,
        grid=grid,
        bucket_blocks=tuple(
            min((2 << bucket) - 1, grid[-1]) for bucket in range(observed_LU.shape[1])
        ),
        curves=tuple(
            tuple(curve if known else None for curve, known in zip(layer, seen, strict=True))
            for layer, seen in zip(rounded, observed_LU.tolist(), strict=True)
        ),
    )


def rank_header(place: RankPlace, job: Job, host: str) -> RankHeader:
    """The first line of a rank's log."""
    return RankHeader(
        world_rank=place.world_rank,
        data_parallel_rank=place.data_parallel_rank,
        pipeline_rank=place.pipeline_rank,
        tensor_parallel_rank=place.tensor_parallel_rank,
        chunk_layers=job.stage_layers[place.pipeline_rank],
        host=host,
    )


def rank_step(
    *,
    iteration: int,
    planned: PlannedStep,
    place: RankPlace,
    job: Job,
    times: StepTimes,
    pieces: Sequence[Piece],
    executed_and_grown_O2: np.ndarray,
) -> RankStep:
    """One step of this rank; budgets are as planned, coverage as executed.

    Args:
        pieces, executed_and_grown_O2: see :meth:`.step_reducer.StepReducer.reduce`.
    """
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    first = 0
    for piece in pieces:
        rows = executed_and_grown_O2[first : first + piece.samples]
        observed.setdefault(piece.position, []).append(rows)
        first += piece.samples

    def recorded(position: int, plan: MicroBatchPlan) -> RankMicroBatch:
        coverage, guarded = None, 0
        if position in observed:
            observed_LS2 = np.stack(observed[position])
            coverage = observed_LS2[..., 0].mean(axis=0).round(_COVERAGE_DIGITS).tolist()
            guarded = int(observed_LS2[..., 1].sum())
        return RankMicroBatch(
            position=position,
            width=plan.cp_size,
            member=place.data_parallel_rank - plan.rank,
            samples=planned.samples[list(plan.samples)].tolist(),
            lengths_tokens=plan.lengths_tokens,
            budgets=plan.budgets_LS[layers],
            coverage=coverage,
            guarded=guarded,
        )

    micro_batches = planned.plan.for_rank(place.data_parallel_rank).micro_batches
    return RankStep(
        iteration=iteration,
        start_unix_s=times.start_unix_s,
        schedule_ms=times.schedule_ms,
        micro_batches=tuple(recorded(*numbered) for numbered in enumerate(micro_batches)),
        spans=tuple(
            span._replace(
                start_ms=round(span.start_ms, _MS_DIGITS), end_ms=round(span.end_ms, _MS_DIGITS)
            )
            for span in times.spans
        ),
    )
