# SPDX-License-Identifier: Apache-2.0
"""The step log: one JSON line per step of what all ranks did, written by one of them.

Shape legend: D data-parallel ranks, P stages, V chunks, M micro-batches, L layers, U length
buckets, K grid of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.plan.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.telemetry.log_file import DEFAULT_MAX_BYTES, JsonLinesFile

STEP_LOG_NAME = "steps.jsonl"
_COVERAGE_DIGITS = 5


class StepLog(JsonLinesFile):
    """``DIR/steps.jsonl``."""

    def __init__(self, directory: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        super().__init__(Path(directory) / STEP_LOG_NAME, max_bytes=max_bytes)

    def begin_run(self, header: Mapping[str, Any], *, resumed: bool) -> None:
        """Start the file, or go on with it after a resume."""
        self.begin({"type": "run", **header}, resumed=resumed)


def step_record(
    *,
    iteration: int,
    iteration_ms: float | None,
    planned: PlannedStep,
    measured: StepMeasurement,
    padded_tokens: int,
    host_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """One line of the log; times in ms, imbalances are max/mean.

    Args:
        host_ms: see :class:`.host_time.HostTime`; of the rank that writes.
    """
    expectation = planned.plan.expectation
    work_DPVM = measured.forward_ms + measured.backward_ms
    return {
        "type": "step",
        "iteration": iteration,
        "iteration_ms": iteration_ms,
        "lm_loss": measured.lm_loss,
        "plan_ms": planned.plan_ms,
        "host_ms": host_ms,
        "plan_wait_ms": planned.wait_ms,
        "batching": planned.plan.batching,
        "predicted": {
            "makespan_ms": expectation.makespan_ms,
            "lower_bound_ms": expectation.lower_bound_ms,
            "rank_makespan_ms": list(expectation.rank_makespan_ms),
            "forward_ms": expectation.forward_ms.tolist(),
            "backward_ms": expectation.backward_ms.tolist(),
            "rank_busy_ms": stage_busy_ms(expectation.forward_ms, expectation.backward_ms)
            .max(axis=1)
            .tolist(),
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
            "forward_ms": measured.forward_ms.tolist(),
            "backward_ms": measured.backward_ms.tolist(),
            "rank_busy_ms": rank_busy_ms(measured).tolist(),
            "schedule_ms": measured.schedule_ms.tolist(),
            "imbalance_rank_sums": imbalance(work_DPVM.sum(axis=(1, 2, 3))),
            "imbalance_micro_batches": imbalance(work_DPVM.sum(axis=(1, 2))),
        },
        "coverage": coverage_summary(measured.coverage),
        "guarded_samples": int(measured.coverage.grown),
        "tokens": measured.tokens,
        "padded_tokens": padded_tokens,
    }


def _unless_alike(slowness_DP: np.ndarray) -> list[list[float]] | None:
    return None if (slowness_DP == 1.0).all() else slowness_DP.tolist()


def coverage_record(
    *,
    iteration: int,
    grid: tuple[int, ...],
    mean_LUK: np.ndarray,
    observed_LU: np.ndarray,
) -> dict[str, Any]:
    """The coverage curves as they stand; null in place of one that was never observed."""
    buckets = observed_LU.shape[1]
    rounded = np.round(mean_LUK, _COVERAGE_DIGITS).tolist()
    return {
        "type": "coverage",
        "iteration": iteration,
        "grid": list(grid),
        "bucket_blocks": [min((2 << bucket) - 1, grid[-1]) for bucket in range(buckets)],
        "curves": [
            [curve if known else None for curve, known in zip(layer, seen, strict=True)]
            for layer, seen in zip(rounded, observed_LU.tolist(), strict=True)
        ],
    }


def coverage_summary(totals: CoverageTotals) -> dict[str, float]:
    """Mean and least executed coverage, and the mean the base budgets would have had."""
    count = totals.count or math.nan
    return {
        "mean": totals.executed_sum / count,
        "min": totals.minimum,
        "base_mean": totals.base_sum / count,
    }


def stage_busy_ms(forward_DPVM: np.ndarray, backward_DPVM: np.ndarray) -> np.ndarray:
    """[D, P] ms of computation per stage: the sum over its micro-batches."""
    return (forward_DPVM + backward_DPVM).sum(axis=(2, 3))


def rank_busy_ms(measured: StepMeasurement) -> np.ndarray:
    """[D] ms: the busiest stage of every data-parallel rank; NaN where a time is missing."""
    return stage_busy_ms(measured.forward_ms, measured.backward_ms).max(axis=1)


def imbalance(times_ms: np.ndarray) -> float:
    """max/mean; NaN where a time is missing."""
    return float(times_ms.max() / times_ms.mean())
