# SPDX-License-Identifier: Apache-2.0
"""Planned and measured steps, for tests of what is said about them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from plan import plan_cases

from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.learn.measurement import (
    CoverageTotals,
    StepFigures,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.records import FinishedStep
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job

BLOCK_SIZE = 16
LENGTHS_TOKENS = (250, 12, 40, 77, 130, 16, 200, 31)
SHAPE = ModelShape(
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    vocab_size=256,
    gated_linear_unit=True,
    tensor_parallel_size=1,
)
JOB = Job(data_parallel_size=2, micro_batches=2, stage_layers=(((0, 1), (4, 5)), ((2, 3), (6, 7))))
"""Two ranks of two stages of two chunks of two layers."""


def step_measurement(
    times_2RPVM: np.ndarray, *, schedule_ms: np.ndarray | None = None, **coverage: Any
) -> StepMeasurement:
    """A step of these times, and coverage totals of one layer unless they are given."""
    totals = {
        "sums_LUK": np.zeros((1, 1, 1)),
        "counts_LU": np.zeros((1, 1)),
        "executed_L": np.zeros(1),
        "counts_L": np.zeros(1),
    }
    return StepMeasurement(
        times_2RPVM=times_2RPVM,
        schedule_ms=np.ones(times_2RPVM.shape[1:3]) if schedule_ms is None else schedule_ms,
        coverage=CoverageTotals(
            **{"base_count": float(np.sum(coverage.get("counts_L", 0))), **totals, **coverage}
        ),
        lm_loss=2.0,
        tokens=sum(LENGTHS_TOKENS),
        differing_ranks=(),
    )


def planned_step(scales: StageScales | None = None) -> PlannedStep:
    """Eight samples at base budget 4, in order of arrival; sample i of the plan is number 100 + i.

    Args:
        scales: what calibration has learnt; None: nothing.
    """
    inputs = plan_cases.step_inputs(
        *(JOB, LENGTHS_TOKENS),
        cost=CostModel.analytic(SHAPE, BLOCK_SIZE),
        batching="arrival",
        tuning="off",
        base_budget=4,
        block_size=BLOCK_SIZE,
    )
    scales = scales or inputs["scales"]
    inputs |= {"scales": scales, "coverage": CoverageCurves(JOB.layers, 16, 0.9)}
    return PlannedStep(
        plan=plan_cases.planned(**inputs),
        samples=np.arange(100, 100 + len(LENGTHS_TOKENS)),
        scales=scales,
        plan_ms=3.0,
        wait_ms=1.0,
    )


def measured_as_planned(planned: PlannedStep) -> StepMeasurement:
    """Everything took what was predicted; coverage of layer l is 0.1 (l + 1) in all samples."""
    expectation = planned.plan.expectation
    executed_L = len(LENGTHS_TOKENS) * 0.1 * np.arange(1, JOB.layers + 1)
    makespan_D1 = np.array(expectation.rank_makespan_ms)[:, None]
    return step_measurement(
        expectation.times_2RPVM,
        schedule_ms=makespan_D1 * [[1.0, 0.9]],
        sums_LUK=np.zeros((JOB.layers, 1, 1)),
        counts_LU=np.full((JOB.layers, 1), float(len(LENGTHS_TOKENS))),
        executed_L=executed_L,
        counts_L=np.full(JOB.layers, float(len(LENGTHS_TOKENS))),
        base_sum=float(executed_L.sum()),
        minimum=0.1,
    )


def slowed_down(measured: StepMeasurement, rank: int, stage: int, factor: float) -> StepMeasurement:
    """One device takes so many times as long."""
    times_2RPVM = measured.times_2RPVM.copy()
    times_2RPVM[:, rank, stage] *= factor
    return replace(measured, times_2RPVM=times_2RPVM)


def finished_step(
    planned: PlannedStep, measured: StepMeasurement | None = None, **changes: Any
) -> FinishedStep:
    """A step at its end; None for ``measured``: as planned."""
    measured = measured_as_planned(planned) if measured is None else measured
    values: dict[str, Any] = {
        "iteration": 7,
        "iteration_ms": 10.5,
        "padded_tokens": 3,
        "host_ms": {"plan": 1.0},
        "times": StepTimes(schedule_ms=math.nan, start_unix_s=None, spans=()),
        "pieces": (),
        "executed_O": np.empty(0),
    }
    figures = StepFigures.of(planned, measured)
    return FinishedStep(planned=planned, measured=measured, figures=figures, **(values | changes))
