# SPDX-License-Identifier: Apache-2.0
"""The figures of a step: what log lines, scalars, log files and reports say of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms, stage_busy_ms

_DEPTH_GROUPS = 4

Figure = float | None
"""NaN, or None in a log that was read, where something was not measured."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step of all ranks; docs/TELEMETRY.md says what each is.

    An imbalance is max/mean, times are in ms, and a share or a coverage is of 1. Busy times and
    computing times leave waiting out. A figure of several values has one for each stage, or for
    each quarter of the layers.
    """

    imbalance: Figure
    imbalance_predicted: Figure
    imbalance_micro_batches_predicted: Figure
    imbalance_micro_batches_measured: Figure
    imbalance_rank_sums_predicted: Figure
    imbalance_rank_sums_measured: Figure
    imbalance_makespans_predicted: Figure
    imbalance_makespans_measured: Figure
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
    coverage_gained_by_token: Figure
    coverage_depth_quarter: tuple[Figure, ...]
    unobserved: int
    kept_attention: int
    attended_again: int
    recomputed_otherwise: int
    digest_mismatches: int

    @classmethod
    def of(cls, planned: PlannedStep, measured: StepMeasurement) -> StepFigures:
        """The figures of a step that has ended."""
        plan, scales, totals = planned.plan, planned.scales, measured.coverage
        expected, work_RPVM = plan.expectation, measured.own_2RPVM.sum(axis=0)
        makespan_R = measured.schedule_ms.max(axis=1)
        busy_R, predicted_R = (
            rank_busy_ms(times) for times in (measured.own_2RPVM, expected.times_2RPVM)
        )
        busy_RP, predicted_RP = (
            stage_busy_ms(times) for times in (measured.own_2RPVM, expected.times_2RPVM)
        )
        # Without what calibration has learnt: that a stage is slow.
        table_RP = stage_busy_ms(expected.times_2RPVM / scales.factors_2RPV[..., None])
        relative_RP = busy_RP / table_RP / (busy_RP / table_RP).mean()
        budgets_LS = plan.budgets_LS
        quarters = zip(
            np.array_split(totals.executed_L, _DEPTH_GROUPS),
            np.array_split(totals.counts_L, _DEPTH_GROUPS),
            strict=True,
        )
        return cls(
            imbalance=imbalance(busy_R),
            imbalance_predicted=imbalance(predicted_R),
            imbalance_micro_batches_predicted=expected.imbalance_micro_batches,
            imbalance_micro_batches_measured=imbalance(work_RPVM.sum(axis=(1, 2))),
            imbalance_rank_sums_predicted=expected.imbalance_rank_sums,
            imbalance_rank_sums_measured=imbalance(work_RPVM.sum(axis=(1, 2, 3))),
            imbalance_makespans_predicted=expected.imbalance_makespans,
            imbalance_makespans_measured=imbalance(makespan_R),
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
            bubble_fraction_stage=_floats((1.0 - busy_RP / makespan_R[:, None]).mean(axis=0)),
            relative_time_stage=_floats(relative_RP.mean(axis=0)),
            relative_time_max=float(relative_RP.max()),
            slowness_planned_max=float(scales.device_slowness_RP.max()),
            work_ratio=expected.work_ratio,
            tuned_samples=expected.samples_cut + expected.samples_raised,
            budget_blocks_mean=float(budgets_LS.mean()),
            budget_blocks_min=float(budgets_LS.min()),
            budget_blocks_max=float(budgets_LS.max()),
            coverage=totals.executed_mean,
            coverage_predicted=expected.coverage_mean,
            coverage_base=totals.base_mean,
            coverage_min=totals.minimum if totals.counts_L.any() else math.nan,
            coverage_gained_by_token=-totals.lost_by_token,
            coverage_depth_quarter=tuple(
                float(sums.sum() / (count.sum() or math.nan)) for sums, count in quarters
            ),
            unobserved=totals.unobserved,
            kept_attention=measured.recompute.kept,
            attended_again=measured.recompute.again,
            recomputed_otherwise=measured.recompute.otherwise,
            digest_mismatches=len(measured.differing_ranks),
        )

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Name and value of everything that was measured; stages count from 0, quarters from 1."""
        for each in fields(self):
            name, value = each.name.replace("_", "-"), getattr(self, each.name)
            if isinstance(value, tuple):
                first = 1 if name.endswith("quarter") else 0
                named = {f"{name}-{number}": of for number, of in enumerate(value, first)}
            else:
                named = {name: value}
            for full_name, of in named.items():
                if of is not None and math.isfinite(of):
                    yield full_name, float(of)


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.tolist())
