# SPDX-License-Identifier: Apache-2.0
"""A step's figures as scalars for TensorBoard and Weights & Biases; docs/TELEMETRY.md lists them.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
U length buckets, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebalance_megatron.cost.flops import training_flops
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.learn.measurement import CoverageTotals, StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.recording import FinishedStep
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms, stage_busy_ms

PREFIX = "sparse-balance"
MISMATCHES = "digest-mismatches"
_DEPTH_GROUPS = 4


class ScalarWriter:
    """Writes to Megatron's own writers, on the rank that has them.

    Args:
        tensorboard: a ``SummaryWriter``, or None.
        wandb: what has a ``log(values, step)`` like wandb, or None.
        interval: iterations from one writing to the next.
    """

    def __init__(self, tensorboard: Any, wandb: Any, *, interval: int) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._interval = interval

    def due(self, iteration: int) -> bool:
        """Whether Megatron logs this iteration."""
        return iteration % self._interval == 0

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write all values that are finite, under :data:`PREFIX`."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        named = {f"{PREFIX}/{name}": value for name, value in finite.items()}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(named, iteration)


def step_scalars(
    step: FinishedStep, *, shape: ModelShape, block_size: int, world_size: int
) -> dict[str, float]:
    """Name -> value, NaN where a time is missing."""
    planned, measured, plan = step.planned, step.measured, step.planned.plan
    iteration_ms = math.nan if step.iteration_ms is None else step.iteration_ms
    lengths_S = np.array([length for each in plan.micro_batches for length in each.lengths_tokens])
    budgets_LS = np.concatenate([each.budgets_LS for each in plan.micro_batches], axis=1)
    executed, dense = (
        training_flops(
            shape,
            layers=len(budgets_LS),
            lengths_tokens_S=lengths_S,
            budgets_LS=budgets,
            block_size=block_size,
        )
        for budgets in (budgets_LS, None)
    )
    # 1e9 per ms is 1e12 per second.
    per_rank = iteration_ms * 1e9 * world_size
    return {
        **_balance(planned, measured),
        **_stages(planned, measured),
        **_coverage(measured.coverage),
        "budget-blocks-mean": float(budgets_LS.mean()),
        "budget-blocks-min": float(budgets_LS.min()),
        "budget-blocks-max": float(budgets_LS.max()),
        "tokens-per-second": measured.tokens / iteration_ms * 1e3,
        "tflops-per-rank-executed": executed / per_rank,
        "tflops-per-rank-dense-equivalent": dense / per_rank,
        "plan-ms": planned.plan_ms,
        "host-ms": sum(step.host_ms.values()),
        MISMATCHES: len(measured.differing_ranks),
    }


def _balance(planned: PlannedStep, measured: StepMeasurement) -> dict[str, float]:
    expectation = planned.plan.expectation
    work_RPVM = measured.own_2RPVM[0] + measured.own_2RPVM[1]
    makespan_R = measured.schedule_ms.max(axis=1)
    busy_R = rank_busy_ms(measured.own_2RPVM)
    predicted_R = rank_busy_ms(expectation.times_2RPVM)
    return {
        "imbalance-micro-batches-predicted": expectation.imbalance_micro_batches,
        "imbalance-micro-batches-measured": imbalance(work_RPVM.sum(axis=(1, 2))),
        "imbalance-rank-sums-predicted": expectation.imbalance_rank_sums,
        "imbalance-rank-sums-measured": imbalance(work_RPVM.sum(axis=(1, 2, 3))),
        "imbalance-makespans-predicted": expectation.imbalance_makespans,
        "imbalance-makespans-measured": imbalance(makespan_R),
        "makespan-ms-predicted": expectation.makespan_ms,
        "makespan-ms-measured": float(makespan_R.max()),
        "predicted-error": float(np.abs(predicted_R / busy_R - 1.0).mean()),
    }


def _stages(planned: PlannedStep, measured: StepMeasurement) -> dict[str, float]:
    """Bubbles, and how long stages take for the work they got: a slow device, not a long sample."""
    expectation, scales = planned.plan.expectation, planned.scales
    busy_RP = stage_busy_ms(measured.own_2RPVM)
    makespan_R1 = measured.schedule_ms.max(axis=1, keepdims=True)
    bubble_P = (1.0 - busy_RP / makespan_R1).mean(axis=0)
    # Without what calibration has learnt: that a stage is slow.
    table_RP = stage_busy_ms(expectation.times_2RPVM / scales.factors_2RPV[..., None])
    ratio_RP = busy_RP / table_RP
    relative_RP = ratio_RP / ratio_RP.mean()
    return {
        **_numbered("bubble-fraction-stage", bubble_P),
        "wait-time-ratio": float(1.0 - busy_RP.mean() / makespan_R1.max()),
        **_numbered("relative-time-stage", relative_RP.mean(axis=0)),
        "relative-time-max": float(relative_RP.max()),
        "slowness-planned-max": float(scales.device_slowness_RP.max()),
    }


def _coverage(totals: CoverageTotals) -> dict[str, float]:
    executed = np.array_split(totals.executed_L, _DEPTH_GROUPS)
    counts = np.array_split(totals.counts_L, _DEPTH_GROUPS)
    quarters = [
        float(sums.sum() / count.sum()) if count.sum() else math.nan
        for sums, count in zip(executed, counts, strict=True)
    ]
    return {
        "coverage-mean": totals.executed_mean,
        "coverage-min": totals.minimum,
        "coverage-lost": totals.lost,
        "coverage-lost-by-token": totals.lost_by_token,
        **_numbered("coverage-depth-quarter", quarters, first=1),
    }


def _numbered(name: str, values: Any, *, first: int = 0) -> dict[str, float]:
    return {f"{name}-{number}": float(value) for number, value in enumerate(values, first)}
