# SPDX-License-Identifier: Apache-2.0
"""Scalars of a step, from steps whose figures are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from step_cases import (
    BLOCK_SIZE,
    LENGTHS_TOKENS,
    SHAPE,
    finished_step,
    measured_as_planned,
    planned_step,
)

from sparsebalance_megatron.run.sinks import step_scalars, write_scalars


def scalars(planned: Any, measured: Any, iteration_ms: float | None = 500.0) -> dict[str, float]:
    step = finished_step(
        planned, measured, iteration_ms=iteration_ms, host_ms={"plan": 1.0, "hooks": 0.5}
    )
    return step_scalars(step, shape=SHAPE, block_size=BLOCK_SIZE, world_size=4)


def test_coverage_by_depth_budgets_and_speed() -> None:
    planned = planned_step()
    values = scalars(planned, measured_as_planned(planned))
    # Eight layers of coverage 0.1 to 0.8, in quarters of two.
    for quarter in range(1, 5):
        assert values[f"coverage-depth-quarter-{quarter}"] == pytest.approx(0.2 * quarter - 0.05)
    assert values["coverage-base"] == pytest.approx(0.45)
    assert values["coverage-min"] == 0.1
    assert {values[f"budget-blocks-{what}"] for what in ("mean", "min", "max")} == {4.0}
    assert (values["plan-ms"], values["host-ms"]) == (3.0, 1.5)
    assert values["tokens-per-second"] == pytest.approx(sum(LENGTHS_TOKENS) / 0.5)
    executed, dense = (
        values[f"tflops-per-rank-{kind}"] for kind in ("executed", "dense-equivalent")
    )
    assert 0.0 < executed < dense
    slower = scalars(planned, measured_as_planned(planned), iteration_ms=1000.0)
    assert slower["tflops-per-rank-executed"] == pytest.approx(executed / 2)


def test_wandb_gets_what_was_measured_of_a_step_at_once() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    unmeasured = replace(measured, schedule_ms=np.full_like(measured.schedule_ms, math.nan))
    values = scalars(planned, unmeasured, iteration_ms=None)
    wandb = Mock()
    write_scalars((None, wandb, 5), 10, values)
    ((logged, step),) = (call.args for call in wandb.log.call_args_list)
    assert step == 10
    assert all(math.isfinite(value) for value in logged.values())
    missing = scalars(planned, measured).keys() - values.keys()
    assert {f"sparse-balance/{name}" for name in values} == logged.keys()
    assert missing == {
        "imbalance-makespans-measured",
        "makespan-ms-measured",
        "bubble-fraction-stage-0",
        "bubble-fraction-stage-1",
        "waiting-share",
        "tokens-per-second",
        "tflops-per-rank-executed",
        "tflops-per-rank-dense-equivalent",
    }
