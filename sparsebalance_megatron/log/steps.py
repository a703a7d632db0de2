# SPDX-License-Identifier: Apache-2.0
"""What readers of a step log need of a step: figures of every step, times of a few.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, 2 forward
and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.log.records import Number, StepRecord
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.metrics import stage_busy_ms

SIDES = ("predicted", "measured")
"""What is known of a step's times."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Figures of one training step. Times in ms; None where nothing was measured.

    ``measured_rank_ms`` and ``predicted_rank_ms`` hold, per data-parallel rank, the computing time
    of its busiest pipeline stage. ``lower_bound_ms`` and ``work_ratio`` are the planner's, and
    ``coverage_base`` is the mean coverage that base budgets had given.
    ``complete``: every micro-batch was measured, forward and backward.
    ``compute_ms``: the mean over all stages of all ranks of their computing time. ``schedule_ms``:
    from the schedule's start to the last backward of the slowest rank.
    """

    iteration: int
    iteration_ms: float | None
    lm_loss: float | None
    tokens: int
    coverage: float | None
    measured_rank_ms: tuple[float, ...] | None
    predicted_rank_ms: tuple[float, ...] | None
    lower_bound_ms: float | None
    work_ratio: float | None
    complete: bool
    coverage_base: float | None = None
    compute_ms: float | None = None
    schedule_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatchTimes:
    """ms of every micro-batch of one step; measured ones are NaN where nothing was measured.

    ``cp_sizes_RM``: neighbouring ranks that shared the micro-batch.
    """

    measured_2RPVM: np.ndarray
    predicted_2RPVM: np.ndarray
    cp_sizes_RM: np.ndarray

    @property
    def shared_rows(self) -> int:
        """Micro-batches that lay on more than one rank."""
        wide = self.cp_sizes_RM[self.cp_sizes_RM > 1]
        return round(float((1.0 / wide).sum()))

    @property
    def widest(self) -> int:
        """Most ranks that shared one."""
        return int(self.cp_sizes_RM.max(initial=1))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """R, P, V and M."""
        _, ranks, stages, virtual_stages, micro_batches = self.measured_2RPVM.shape
        return ranks, stages, virtual_stages, micro_batches

    def side(self, name: str) -> np.ndarray:
        """Those of one of :data:`SIDES`."""
        return dict(zip(SIDES, (self.predicted_2RPVM, self.measured_2RPVM), strict=True))[name]


def step_of(record: StepRecord) -> Step:
    """The figures of a record."""
    measured, predicted = record.measured, record.predicted
    times_2RPVM = np.stack([measured.forward_ms, measured.backward_ms])
    complete = bool(np.isfinite(times_2RPVM).all())
    schedule_ms = _all_or_none(tuple(ms for rank in measured.schedule_ms for ms in rank))
    return Step(
        iteration=record.iteration,
        iteration_ms=record.iteration_ms,
        lm_loss=record.lm_loss,
        tokens=record.tokens,
        coverage=record.coverage.mean,
        measured_rank_ms=_all_or_none(measured.rank_busy_ms),
        predicted_rank_ms=_all_or_none(predicted.rank_busy_ms),
        lower_bound_ms=predicted.lower_bound_ms,
        work_ratio=predicted.work_ratio,
        complete=complete,
        coverage_base=record.coverage.base_mean,
        compute_ms=float(stage_busy_ms(times_2RPVM).mean()) if complete else None,
        schedule_ms=max(schedule_ms) if schedule_ms else None,
    )


def times_of(record: StepRecord) -> MicroBatchTimes:
    """The times of a record's micro-batches."""
    measured, predicted = record.measured, record.predicted
    ranks, *_, positions = measured.forward_ms.shape
    widths = record.widths
    return MicroBatchTimes(
        measured_2RPVM=np.stack([measured.forward_ms, measured.backward_ms]),
        predicted_2RPVM=np.stack([predicted.forward_ms, predicted.backward_ms]),
        cp_sizes_RM=unshared(ranks, positions) if widths is None else np.array(widths),
    )


def _all_or_none(values: tuple[Number, ...]) -> tuple[float, ...] | None:
    """None as soon as one is."""
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(values) else None
