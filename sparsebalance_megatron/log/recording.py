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

from sparsebalance_megatron.learn.measurement import Piece, RankPlace, StepMeasurement, StepTimes
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
_PLANNED_MS_DIGITS = 6
_COVERAGE_DIGITS = 5
_EXPECTED = (
    *("makespan_ms", "lower_bound_ms", "imbalance_micro_batches", "imbalance_rank_sums"),
    *("imbalance_makespans", "work_ratio", "samples_cut", "samples_raised", "samples_clamped"),
)
"""Names that a plan's expectation and its record share."""
_SHAPE = (
    *("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers"),
    "stage_layers",
)
"""Names that a job and a run's header share."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """Facts about a step at its end, of all ranks; nothing in it changes afterwards.

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
        **{name: getattr(job, name) for name in _SHAPE},
        schedule=schedule_name(job.pipeline_stages, job.virtual_stages),
        micro_batch_group_size=UNSET if group_size is None else group_size,
        lockstep_ranks=UNSET if job.lockstep_ranks == 1 else job.lockstep_ranks,
        sources=tuple(DataSource(**source) for source in sources) or UNSET,
        **settings,
    )


def step_record(step: FinishedStep) -> StepRecord:
    """A step of all ranks."""
    planned, measured, coverage = step.planned, step.measured, step.measured.coverage
    expectation = planned.plan.expectation
    slowness_RP = planned.scales.device_slowness_RP
    own_2RPVM = measured.own_2RPVM
    work_RPVM = own_2RPVM[0] + own_2RPVM[1]
    waits = measured.waiting_2RPVM is not None
    cp_sizes = _by_rank(planned.plan, "cp_size")
    return StepRecord(
        iteration=step.iteration,
        iteration_ms=step.iteration_ms,
        lm_loss=measured.lm_loss,
        plan_ms=planned.plan_ms,
        host_ms=dict(step.host_ms),
        plan_wait_ms=planned.wait_ms,
        batching=planned.plan.batching,
        cp_sizes=cp_sizes if any(size > 1 for of_rank in cp_sizes for size in of_rank) else None,
        predicted=Predicted(
            **{name: getattr(expectation, name) for name in _EXPECTED},
            rank_makespan_ms=tuple(expectation.rank_makespan_ms),
            forward_ms=expectation.times_2RPVM[0],
            backward_ms=expectation.times_2RPVM[1],
            rank_busy_ms=rank_busy_ms(expectation.times_2RPVM).tolist(),
            device_slowness=slowness_RP.tolist() if (slowness_RP != 1.0).any() else None,
            segment_ms=tuple(each.round(_PLANNED_MS_DIGITS) for each in expectation.segment_ms)
            or UNSET,
        ),
        measured=Measured(
            forward_ms=measured.times_2RPVM[0],
            backward_ms=measured.times_2RPVM[1],
            own_forward_ms=own_2RPVM[0] if waits else UNSET,
            own_backward_ms=own_2RPVM[1] if waits else UNSET,
            rank_busy_ms=rank_busy_ms(own_2RPVM).tolist(),
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
        tokens=measured.tokens,
        padded_tokens=step.padded_tokens,
        recompute=Recompute(**measured.recompute._asdict()),
        segments=_by_rank(planned.plan, "segments") if planned.in_segments else UNSET,
    )


def _by_rank(plan: StepPlan, name: str) -> tuple[tuple[int, ...], ...]:
    """An attribute of the micro-batches of every rank."""
    ranks = map(plan.for_rank, range(plan.data_parallel_size))
    return tuple(tuple(getattr(each, name) for each in rank.micro_batches) for rank in ranks)


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
    ranks = ("world_rank", "data_parallel_rank", "pipeline_rank", "tensor_parallel_rank")
    return RankHeader(
        **{name: getattr(place, name) for name in ranks},
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
    executed_O: np.ndarray,
) -> RankStep:
    """One step of this rank.

    Args:
        pieces, executed_O: see :meth:`.step_reducer.StepReducer.reduce`.
    """
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    first = 0
    for piece in pieces:
        rows = executed_O[first : first + piece.samples]
        observed.setdefault(piece.position, []).append(rows)
        first += piece.samples

    def recorded(position: int, plan: MicroBatchPlan) -> RankMicroBatch:
        coverage = None
        if position in observed:
            executed_LS = np.stack(observed[position])
            coverage = executed_LS.mean(axis=0).round(_COVERAGE_DIGITS).tolist()
        return RankMicroBatch(
            position=position,
            cp_size=plan.cp_size,
            member=place.data_parallel_rank - plan.rank,
            samples=planned.samples[list(plan.samples)].tolist(),
            lengths_tokens=plan.lengths_tokens,
            budgets=plan.budgets_LS[layers],
            coverage=coverage,
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
