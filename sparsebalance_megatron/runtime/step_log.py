# SPDX-License-Identifier: Apache-2.0
"""The step log: one JSON line per step, written by one rank, never in the way of training."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.runtime.scheduler import PlannedStep
from sparsebalance_megatron.runtime.telemetry import CoverageTotals, StepMeasurement

STEP_LOG_NAME = "steps.jsonl"

_logger = logging.getLogger(__name__)


class StepLog:
    """Appends records to ``DIR/steps.jsonl``; a full disk costs one warning, not the run."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / STEP_LOG_NAME
        self._broken = False
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def begin_run(self, header: dict[str, Any], *, resumed: bool) -> None:
        """Start the file, or go on with it after a resume."""
        if not resumed:
            self._path.unlink(missing_ok=True)
        self.append({"type": "run", **header})

    def append(self, record: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(_finite(record)) + "\n")
        except OSError as error:
            self._broken = True
            _logger.warning("step log %s stops here: %s", self._path, error)


def step_record(
    *,
    iteration: int,
    iteration_ms: float | None,
    planned: PlannedStep,
    measured: StepMeasurement,
    padded_tokens: int,
) -> dict[str, Any]:
    """One line of the log; times in ms, imbalances are max/mean."""
    expectation = planned.plan.expectation
    busy_ms = rank_busy_ms(measured)
    return {
        "type": "step",
        "iteration": iteration,
        "iteration_ms": iteration_ms,
        "lm_loss": measured.lm_loss,
        "plan_ms": planned.plan_ms,
        "plan_wait_ms": planned.wait_ms,
        "batching": planned.plan.batching,
        "predicted": {
            "makespan_ms": expectation.makespan_ms,
            "lower_bound_ms": expectation.lower_bound_ms,
            "rank_makespan_ms": list(expectation.rank_makespan_ms),
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
        },
        "measured": {
            "forward_ms": measured.forward_ms.tolist(),
            "backward_ms": measured.backward_ms.tolist(),
            "rank_busy_ms": busy_ms.tolist(),
            "schedule_ms": measured.schedule_ms.tolist(),
            "imbalance_rank_sums": imbalance(busy_ms),
            "imbalance_micro_batches": imbalance(
                (measured.forward_ms + measured.backward_ms).sum(axis=(1, 2)).ravel()
            ),
        },
        "coverage": coverage_summary(measured.coverage),
        "guarded_samples": int(measured.coverage.grown),
        "tokens": measured.tokens,
        "padded_tokens": padded_tokens,
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


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
