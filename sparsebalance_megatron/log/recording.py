# SPDX-License-Identifier: Apache-2.0
"""Makes the records of a run from what was planned and measured.

Shape legend: O rows of observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.learn.measurement import (
    Piece,
    RankPlace,
    StepFigures,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.records import (
    LOG_FORMAT,
    CoverageRecord,
    RankHeader,
    RankMicroBatch,
    RankStep,
    StepRecord,
)
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

_MS_DIGITS = 4
_COVERAGE_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """Facts about a step at its end; nothing in it changes afterwards.

    ``iteration_ms`` is None in the first step of a process. Of the rank that writes alone are
    ``host_ms`` (:class:`.timing.HostTime`), ``times``, and the coverage that it observed
    (:meth:`.step_reducer.StepReducer.reduce`): ``pieces`` say whose, ``executed_O`` how much.
    """

    iteration: int
    iteration_ms: float | None
    planned: PlannedStep
    measured: StepMeasurement
    figures: StepFigures
    padded_tokens: int
    host_ms: Mapping[str, float]
    times: StepTimes
    pieces: Sequence[Piece]
    executed_O: np.ndarray


def step_record(step: FinishedStep) -> StepRecord:
    """A step of all ranks."""
    planned, plan = step.planned, step.planned.plan
    by_rank = [plan.for_rank(rank).micro_batches for rank in range(plan.data_parallel_size)]
    return StepRecord(
        iteration=step.iteration,
        iteration_ms=step.iteration_ms,
        lm_loss=step.measured.lm_loss,
        tokens=step.measured.tokens,
        padded_tokens=step.padded_tokens,
        plan_ms=planned.plan_ms,
        plan_wait_ms=planned.wait_ms,
        host_ms=dict(step.host_ms),
        batching=plan.batching,
        cp_sizes_RM=np.array([[each.cp_size for each in own] for own in by_rank]),
        segments_RM=np.array([[each.segments for each in own] for own in by_rank]),
        device_slowness_RP=np.broadcast_to(
            planned.scales.device_slowness_RP, step.measured.schedule_ms.shape
        ),
        figures=step.figures,
        predicted=plan.expectation,
        measured=step.measured.times,
    )


def coverage_record(iteration: int, known: CoverageCurves) -> CoverageRecord:
    """The coverage curves as they stand."""
    known_LUK = np.where(known.observed_LU[..., None], known.mean_LUK, math.nan)
    return CoverageRecord(
        iteration=iteration,
        grid=known.grid,
        bucket_blocks=tuple(
            min((2 << bucket) - 1, known.grid[-1]) for bucket in range(known.buckets)
        ),
        curves_LUK=np.round(known_LUK, _COVERAGE_DIGITS),
    )


def rank_header(place: RankPlace, job: Job, host: str) -> RankHeader:
    """The first line of a rank's log."""
    ranks = ("world_rank", "data_parallel_rank", "pipeline_rank", "tensor_parallel_rank")
    return RankHeader(
        **{name: getattr(place, name) for name in ranks},
        log_format=LOG_FORMAT,
        chunk_layers=job.stage_layers[place.pipeline_rank],
        host=host,
    )


def rank_step(step: FinishedStep, place: RankPlace, job: Job) -> RankStep:
    """One step of this rank."""
    planned, times = step.planned, step.times
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    first = 0
    for piece in step.pieces:
        rows = step.executed_O[first : first + piece.samples]
        observed.setdefault(piece.position, []).append(rows)
        first += piece.samples

    def recorded(plan: MicroBatchPlan) -> RankMicroBatch:
        of_layers = observed.get(plan.position)
        coverage_S = None
        if of_layers is not None:
            coverage_S = tuple(np.mean(of_layers, axis=0).round(_COVERAGE_DIGITS).tolist())
        return RankMicroBatch(
            **vars(plan)
            | {
                "samples": tuple(planned.samples[list(plan.samples)].tolist()),
                "budgets_LS": plan.budgets_LS[layers],
                "coverage": coverage_S,
            }
        )

    return RankStep(
        iteration=step.iteration,
        start_unix_s=times.start_unix_s,
        schedule_ms=times.schedule_ms,
        micro_batches=tuple(
            map(recorded, planned.plan.for_rank(place.data_parallel_rank).micro_batches)
        ),
        spans=tuple(
            span._replace(
                start_ms=round(span.start_ms, _MS_DIGITS), end_ms=round(span.end_ms, _MS_DIGITS)
            )
            for span in times.spans
        ),
    )
