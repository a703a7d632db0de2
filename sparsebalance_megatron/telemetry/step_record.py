# SPDX-License-Identifier: Apache-2.0
"""The step log's line of one step, written and read: what all ranks did, planned and measured.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, 2 forward
and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.learn.measurement import DIRECTIONS, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms, stage_busy_ms
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    array,
    field,
    finite,
    number,
    optional_field,
    optional_number,
)

STEP = "step"
"""Type of the record, in the step log and in the ranks' logs."""

SIDES = ("predicted", "measured")
"""What is known of a step's times."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What is known of a step at its end, of all ranks; nothing in it changes afterwards.

    ``iteration_ms`` is None in the first step of a process. ``host_ms`` is that of the rank which
    writes (:class:`.host_time.HostTime`).
    """

    iteration: int
    iteration_ms: float | None
    planned: PlannedStep
    measured: StepMeasurement
    padded_tokens: int
    host_ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step as logged. Times in ms; None where nothing was measured.

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

    Predicted ones are None in logs that hold totals only. ``widths_RM``: neighbouring ranks that
    shared the row; None where none was shared, and in logs that do not say.
    """

    measured_2RPVM: np.ndarray
    predicted_2RPVM: np.ndarray | None
    widths_RM: np.ndarray | None = None

    @property
    def shared_rows(self) -> int:
        """Rows that lay on more than one rank."""
        if self.widths_RM is None:
            return 0
        wide = self.widths_RM[self.widths_RM > 1]
        return round(float((1.0 / wide).sum()))

    @property
    def widest(self) -> int:
        """Ranks of the row that most shared."""
        return 1 if self.widths_RM is None else int(self.widths_RM.max())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """R, P, V and M."""
        _, ranks, stages, virtual_stages, micro_batches = self.measured_2RPVM.shape
        return ranks, stages, virtual_stages, micro_batches

    def side(self, name: str) -> np.ndarray | None:
        """Those of one of :data:`SIDES`."""
        return dict(zip(SIDES, (self.predicted_2RPVM, self.measured_2RPVM), strict=True))[name]


def step_record(step: FinishedStep) -> dict[str, Any]:
    """One line of the log; times in ms, imbalances are max/mean."""
    planned, measured, coverage = step.planned, step.measured, step.measured.coverage
    expectation = planned.plan.expectation
    work_RPVM = measured.times_2RPVM[0] + measured.times_2RPVM[1]
    return {
        "type": STEP,
        "iteration": step.iteration,
        "iteration_ms": step.iteration_ms,
        "lm_loss": measured.lm_loss,
        "plan_ms": planned.plan_ms,
        "host_ms": step.host_ms,
        "plan_wait_ms": planned.wait_ms,
        "batching": planned.plan.batching,
        "widths": _widths_if_shared(planned.plan),
        "predicted": {
            "makespan_ms": expectation.makespan_ms,
            "lower_bound_ms": expectation.lower_bound_ms,
            "rank_makespan_ms": list(expectation.rank_makespan_ms),
            "forward_ms": expectation.times_2RPVM[0].tolist(),
            "backward_ms": expectation.times_2RPVM[1].tolist(),
            "rank_busy_ms": rank_busy_ms(expectation.times_2RPVM).tolist(),
            "imbalance_micro_batches": expectation.imbalance_micro_batches,
            "imbalance_rank_sums": expectation.imbalance_rank_sums,
            "imbalance_makespans": expectation.imbalance_makespans,
            "work_ratio": expectation.work_ratio,
            "samples_cut": expectation.samples_cut,
            "samples_raised": expectation.samples_raised,
            "samples_clamped": expectation.samples_clamped,
            "device_slowness": _unless_alike(planned.scales.device_slowness_RP),
        },
        "measured": {
            "forward_ms": measured.times_2RPVM[0].tolist(),
            "backward_ms": measured.times_2RPVM[1].tolist(),
            "rank_busy_ms": rank_busy_ms(measured.times_2RPVM).tolist(),
            "schedule_ms": measured.schedule_ms.tolist(),
            "imbalance_rank_sums": imbalance(work_RPVM.sum(axis=(1, 2, 3))),
            "imbalance_micro_batches": imbalance(work_RPVM.sum(axis=(1, 2))),
        },
        "coverage": {
            "mean": coverage.executed_mean,
            "min": coverage.minimum,
            "base_mean": coverage.base_mean,
            "unobserved": coverage.unobserved,
        },
        "guarded_samples": int(coverage.grown),
        "tokens": measured.tokens,
        "padded_tokens": step.padded_tokens,
        "recompute": measured.recompute._asdict(),
    }


def read_step(record: Mapping[str, Any]) -> Step:
    """What :func:`step_record` wrote, in this version or an earlier one.

    Raises:
        BadLineError: naming the value that is missing or is not what it should be.
    """
    iteration, tokens = number(record, "iteration"), number(record, "tokens")
    if iteration is None or tokens is None:
        raise BadLineError("iteration or tokens is null")
    measured, predicted = _rank_times(record, "measured"), _rank_times(record, "predicted")
    if measured and predicted and len(measured) != len(predicted):
        raise BadLineError(f"{len(measured)} ranks measured, {len(predicted)} predicted")
    times_2RPVM = _measured_times(record)
    complete = bool(np.isfinite(times_2RPVM).all())
    return Step(
        iteration=int(iteration),
        iteration_ms=number(record, "iteration_ms"),
        lm_loss=number(record, "lm_loss"),
        tokens=int(tokens),
        coverage=number(record, "coverage", "mean"),
        measured_rank_ms=measured,
        predicted_rank_ms=predicted,
        lower_bound_ms=number(record, "predicted", "lower_bound_ms"),
        work_ratio=number(record, "predicted", "work_ratio"),
        complete=complete,
        coverage_base=optional_number(record, "coverage", "base_mean"),
        compute_ms=float(stage_busy_ms(times_2RPVM).mean())
        if complete and times_2RPVM.size
        else None,
        schedule_ms=_schedule_ms(record),
    )


def read_times(record: Mapping[str, Any]) -> MicroBatchTimes:
    """The times of a step's micro-batches; raises :class:`BadLineError` as :func:`read_step`."""
    measured_2RPVM = _measured_times(record)
    return MicroBatchTimes(
        measured_2RPVM=measured_2RPVM,
        predicted_2RPVM=_predicted_times(record, measured_2RPVM.shape),
        widths_RM=_read_widths(record, measured_2RPVM.shape),
    )


def _schedule_ms(record: Mapping[str, Any]) -> float | None:
    """Of the slowest stage; None where one of them has none, as in logs without them."""
    values = optional_field(record, "measured", "schedule_ms")
    if values is None:
        return None
    schedule_RP = array(values, "measured.schedule_ms")
    known = schedule_RP.size > 0 and bool(np.isfinite(schedule_RP).all())
    return float(schedule_RP.max()) if known else None


def _unless_alike(slowness_RP: np.ndarray) -> list[list[float]] | None:
    return None if (slowness_RP == 1.0).all() else slowness_RP.tolist()


def _widths_if_shared(plan: StepPlan) -> list[list[int]] | None:
    if all(slot.width == 1 for slot in plan.slots):
        return None
    return [
        [slot.width for slot in plan.for_rank(rank).micro_batches]
        for rank in range(plan.data_parallel_size)
    ]


def _read_widths(record: Mapping[str, Any], times_shape: tuple[int, ...]) -> np.ndarray | None:
    """[R, M]; None where the record has none."""
    values = optional_field(record, "widths")
    if values is None:
        return None
    widths_RM = array(values, "widths")
    if widths_RM.shape != (times_shape[1], times_shape[-1]) or not _are_widths(widths_RM):
        raise BadLineError(f"widths is {str(values)[:60]}, no groups of neighbouring ranks")
    return widths_RM.astype(np.int64)


def _are_widths(widths_RM: np.ndarray) -> bool:
    """Whether the ranks fall into groups of powers of two at every position."""
    ranks, positions = widths_RM.shape
    for width in np.unique(widths_RM).tolist():
        if not (0 < width <= ranks and width.is_integer() and int(width).bit_count() == 1):
            return False
        members_RM = widths_RM == width
        whole_groups = ranks - ranks % int(width)
        groups = members_RM[:whole_groups].reshape(-1, int(width), positions)
        if members_RM[whole_groups:].any() or (groups.any(axis=1) != groups.all(axis=1)).any():
            return False
    return True


def _measured_times(record: Mapping[str, Any]) -> np.ndarray:
    forward, backward = (
        array(field(record, "measured", f"{name}_ms"), f"measured.{name}_ms") for name in DIRECTIONS
    )
    if forward.ndim != 4 or forward.shape != backward.shape:
        raise BadLineError(
            f"measured.forward_ms {forward.shape} and .backward_ms {backward.shape} must both be "
            "[rank][stage][virtual stage][micro-batch]"
        )
    return np.stack([forward, backward])


def _predicted_times(record: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray | None:
    """None where they are missing, incomplete, or not of the measured ones' shape."""
    both = [optional_field(record, "predicted", f"{name}_ms") for name in DIRECTIONS]
    if None in both:
        return None
    times = [
        array(values, f"predicted.{name}_ms") for name, values in zip(DIRECTIONS, both, strict=True)
    ]
    usable = all(each.shape == shape[1:] and np.isfinite(each).all() for each in times)
    return np.stack(times) if usable else None


def _rank_times(record: Mapping[str, Any], side: str) -> tuple[float, ...] | None:
    """[R] ms, or None as soon as one rank has none."""
    place = f"{side}.rank_busy_ms"
    values = field(record, side, "rank_busy_ms")
    if values is None:
        return None
    if not isinstance(values, list) or not values:
        raise BadLineError(f"{place} is {values!r}, not a list of numbers")
    numbers = [finite(value, place) for value in values]
    known = [value for value in numbers if value is not None]
    return tuple(known) if len(known) == len(numbers) else None
