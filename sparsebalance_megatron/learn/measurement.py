# SPDX-License-Identifier: Apache-2.0
"""Measurements of a step: on one rank, reduced over ranks, and the figures that say how it went.

Shape legend: U length buckets, W ranks that share a micro-batch, Y segments of a micro-batch, X
collectives of a chunk, Z passes through a collective.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.pipeline.operation_times import (
    imbalance,
    rank_busy_ms,
    stage_busy_ms,
)
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

PASSES = 4
"""Through a collective of a segment: one forward, and in backward one recomputed and two of
gradients."""
CollectivePlace = tuple[int, int, int, int, int]
"""Chunk, position, segment, number of one of the chunk's collectives, and which of the
:data:`PASSES`."""
LOG_LINE = ("imbalance", "predicted_to_measured", "coverage", "tuned_samples")
"""Figures in the trainer's log line, which hands them to its writers."""
COUNTS_IN_LOG_LINE = ("unobserved",)
"""Figures that are there only where they are not zero."""

Figure = float | None
"""NaN, or None in a log that was read, where something was not measured."""


class Span(NamedTuple):
    """A forward or a backward of a micro-batch, or of one of its segments, on this rank; in ms
    since its step's start."""

    direction: str
    chunk: int
    position: int
    start_ms: float
    end_ms: float
    segment: int = 0

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of one rank in one step, in ms.

    ``schedule_ms``: from the schedule's start to this rank's last backward; NaN where unmeasured.
    ``spans``: by start, since ``start_unix_s``, the schedule's start, or that of the first span
    where the schedule began unseen; None where nothing was seen. ``collectives``: those in which
    ranks wait for one another, as (place, ms inside); None where they were not measured.
    """

    schedule_ms: float
    start_unix_s: float | None
    spans: tuple[Span, ...]
    collectives: tuple[tuple[CollectivePlace, float], ...] | None = None


class Piece(NamedTuple):
    """Consecutive rows of an array: the samples of one micro-batch in one layer."""

    position: int
    layer: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Place of this rank in the job."""

    data_parallel_rank: int
    pipeline_rank: int
    tensor_parallel_rank: int
    world_rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class CoverageTotals:
    """Sums over pairs of a sample and a layer; divide by the counts to get means.

    Attributes:
        sums_LUK, counts_LU: coverage at the budgets of the grid, for the coverage curves, without
            samples that were not routed since their budgets cover them.
        counts_L, executed_L: pairs, and executed coverage, by layer.
        base_sum, base_count: coverage of base budgets, and pairs of which it is known: of documents
            that were raised to everything only steps that route all documents know it.
        minimum: the least executed coverage.
        unobserved: pairs whose coverage was not finite; no other figure holds anything of them.
    """

    sums_LUK: np.ndarray
    counts_LU: np.ndarray
    counts_L: np.ndarray
    executed_L: np.ndarray
    base_sum: float = 0.0
    base_count: float = 0.0
    minimum: float = math.inf
    unobserved: int = 0


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """Times of all ranks in one step, in ms; NaN where unmeasured.

    ``times_2RPVM``: forward and backward of every micro-batch on every chunk, as each rank measured
    them. ``waiting_2RPVM``: the part of it in which the rank waited for its lockstep group; None
    where no rank waits. ``schedule_ms``: [R, P] from the start of the step to the stage's last
    backward.
    """

    times_2RPVM: np.ndarray
    schedule_ms: np.ndarray
    waiting_2RPVM: np.ndarray | None = None

    @property
    def own_2RPVM(self) -> np.ndarray:
        """Own times of micro-batches: what they took less the waiting in lockstep groups."""
        if self.waiting_2RPVM is None:
            return self.times_2RPVM
        return self.times_2RPVM - self.waiting_2RPVM


@dataclass(frozen=True, kw_only=True)
class StepMeasurement(MeasuredTimes):
    """Measurements of one step, identical on every rank.

    ``differing_ranks``: world ranks that executed another plan than rank 0.
    """

    coverage: CoverageTotals
    lm_loss: float
    tokens: int
    differing_ranks: tuple[int, ...]

    def without_waiting(self, micro_batches: Iterable[MicroBatchPlan]) -> "StepMeasurement":
        """This step without the time that ranks waited for one another inside shared micro-batches.

        A rank that comes first to a shared micro-batch waits inside attention for the last to come,
        which waits for no rank and from then on computes in step with the others. So each operation
        of the micro-batch takes, on all of its ranks, what it took on the rank that took least.
        """
        shared = [micro_batch for micro_batch in micro_batches if micro_batch.cp_size > 1]
        if not shared:
            return self
        times_2RPVM, own_2RPVM = self.times_2RPVM.copy(), self.own_2RPVM.copy()
        for micro_batch in shared:
            ranks = slice(micro_batch.rank, micro_batch.rank + micro_batch.cp_size)
            for each_2RPVM in (times_2RPVM, own_2RPVM):
                of_members_2WPV = each_2RPVM[:, ranks, :, :, micro_batch.position]
                of_members_2WPV[:] = np.fmin.reduce(of_members_2WPV, axis=1, keepdims=True)
        waiting_2RPVM = None if self.waiting_2RPVM is None else times_2RPVM - own_2RPVM
        return replace(self, times_2RPVM=times_2RPVM, waiting_2RPVM=waiting_2RPVM)


def lockstep_waiting(inside_RPVMYXZ: np.ndarray, lockstep_ranks: int) -> np.ndarray:
    """[2, R, P, V, M] ms that ranks waited for others of their lockstep group.

    The last rank to come to a collective waits there for nobody, and is inside for as long as the
    exchange takes. So what others are inside beyond the group's least is waiting, of every exchange
    by itself: one rank may wait in a segment's, another in the next.

    ``inside_RPVMYXZ``: ms inside every collective, by :data:`CollectivePlace`; NaN where
    unmeasured, which leaves the whole group unmeasured.
    """
    ranks, *rest = inside_RPVMYXZ.shape
    by_group = inside_RPVMYXZ.reshape(ranks // lockstep_ranks, lockstep_ranks, *rest)
    waiting = by_group - by_group.min(axis=1, keepdims=True)
    waiting_RPVMZ = waiting.reshape(inside_RPVMYXZ.shape).sum(axis=(-3, -2))
    return np.stack([waiting_RPVMZ[..., 0], waiting_RPVMZ[..., 1:].sum(axis=-1)])


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step of all ranks; docs/TELEMETRY.md says what each is.

    An imbalance is max/mean, times are in ms, and a share or a coverage is of 1. Busy times and
    computing times leave waiting out. A figure of several values has one for each stage.
    """

    imbalance: Figure
    imbalance_predicted: Figure
    makespan_ms_predicted: Figure
    makespan_ms_measured: Figure
    lower_bound_ms: Figure
    busiest_rank_ms_predicted: Figure
    busiest_rank_ms_measured: Figure
    computing_ms_predicted: Figure
    computing_ms_measured: Figure
    predicted_to_measured: Figure
    predicted_error: Figure
    waiting_share: Figure
    bubble_fraction_stage: tuple[Figure, ...]
    relative_time_stage: tuple[Figure, ...]
    relative_time_max: Figure
    slowness_planned_max: Figure
    work_ratio: Figure
    tuned_samples: int
    budget_blocks_mean: Figure
    budget_blocks_min: Figure
    budget_blocks_max: Figure
    coverage: Figure
    coverage_predicted: Figure
    coverage_base: Figure
    coverage_min: Figure
    unobserved: int

    @classmethod
    def of(cls, planned: PlannedStep, measured: StepMeasurement) -> "StepFigures":
        """The figures of a step that has ended."""
        plan, scales, totals = planned.plan, planned.scales, measured.coverage
        expected = plan.expectation
        makespan_R = measured.schedule_ms.max(axis=1)
        both = measured.own_2RPVM, expected.times_2RPVM
        busy_R, predicted_R = map(rank_busy_ms, both)
        busy_RP, predicted_RP = map(stage_busy_ms, both)
        # Without what calibration has learnt: that a stage is slow.
        table_RP = stage_busy_ms(expected.times_2RPVM / scales.factors_2RPV[..., None])
        relative_RP = busy_RP / table_RP / (busy_RP / table_RP).mean()
        idle_RP = 1.0 - busy_RP / makespan_R[:, None]
        budgets_LS, pairs = plan.budgets_LS, totals.counts_L.sum() or math.nan
        return cls(
            imbalance=imbalance(busy_R),
            imbalance_predicted=imbalance(predicted_R),
            makespan_ms_predicted=expected.makespan_ms,
            makespan_ms_measured=float(makespan_R.max()),
            lower_bound_ms=expected.lower_bound_ms,
            busiest_rank_ms_predicted=float(predicted_R.max()),
            busiest_rank_ms_measured=float(busy_R.max()),
            computing_ms_predicted=float(predicted_RP.mean()),
            computing_ms_measured=float(busy_RP.mean()),
            predicted_to_measured=float(predicted_R.max() / busy_R.max()),
            predicted_error=float(np.abs(predicted_R / busy_R - 1.0).mean()),
            waiting_share=float(1.0 - busy_RP.mean() / makespan_R.max()),
            bubble_fraction_stage=tuple(idle_RP.mean(axis=0).tolist()),
            relative_time_stage=tuple(relative_RP.mean(axis=0).tolist()),
            relative_time_max=float(relative_RP.max()),
            slowness_planned_max=float(scales.slowness_RP.max()),
            work_ratio=expected.work_ratio,
            tuned_samples=expected.samples_cut + expected.samples_raised,
            budget_blocks_mean=float(budgets_LS.mean()),
            budget_blocks_min=float(budgets_LS.min()),
            budget_blocks_max=float(budgets_LS.max()),
            coverage=float(totals.executed_L.sum() / pairs),
            coverage_predicted=expected.coverage_mean,
            coverage_base=float(totals.base_sum / (totals.base_count or math.nan)),
            coverage_min=totals.minimum if math.isfinite(pairs) else math.nan,
            unobserved=totals.unobserved,
        )

    def log_line(self) -> dict[str, float]:
        """Name -> value of the figures in the trainer's log line, alike on all ranks."""
        names = (*LOG_LINE, *(name for name in COUNTS_IN_LOG_LINE if getattr(self, name)))
        return {name.replace("_", "-"): float(getattr(self, name)) for name in names}

    def scalars(self) -> dict[str, float]:
        """Name -> value of everything else that was measured; stages count from 0."""
        found: dict[str, float | None] = {}
        for each in fields(self):
            name, value = each.name.replace("_", "-"), getattr(self, each.name)
            if isinstance(value, tuple):
                found |= {f"{name}-{number}": of for number, of in enumerate(value)}
            elif each.name not in (*LOG_LINE, *COUNTS_IN_LOG_LINE):
                found[name] = value
        return {name: of for name, of in found.items() if of is not None and math.isfinite(of)}
