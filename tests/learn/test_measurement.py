# SPDX-License-Identifier: Apache-2.0
"""What waiting leaves of measured times, and what these teach; figures of a step by hand."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import (
    BLOCK_SIZE,
    JOB,
    LENGTHS_TOKENS,
    SHAPE,
    finished_step,
    measured_as_planned,
    planned_step,
    slowed_down,
    step_measurement,
)

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.learn.measurement import PASSES, StepFigures, lockstep_waiting
from sparsebalance_megatron.plan.pipeline.operation_times import rank_busy_ms
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.run.sinks import step_scalars, write_scalars

SHAPE_RPVM = (4, 2, 1, 6)


def micro_batches(cp_sizes_RM: np.ndarray) -> list[MicroBatchPlan]:
    """One micro-batch for every group of ranks at every position."""
    return [
        MicroBatchPlan(
            samples=(0,),
            lengths_tokens=(1,),
            budgets_LS=np.ones((1, 1), dtype=np.int32),
            rank=rank,
            position=position,
            cp_size=int(cp_size),
        )
        for (rank, position), cp_size in np.ndenumerate(cp_sizes_RM)
        if rank % cp_size == 0
    ]


def drawn_cp_sizes(generator: np.random.Generator) -> np.ndarray:
    """Pairs of ranks, at most positions, share or do not."""
    pairs_WM = generator.choice([1, 2], (SHAPE_RPVM[0] // 2, SHAPE_RPVM[-1]))
    return np.repeat(pairs_WM, 2, axis=0)


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.3))
def test_a_shared_micro_batch_takes_what_its_last_rank_took(seed: int, missing: float) -> None:
    generator = np.random.default_rng(seed)
    cp_sizes_RM = drawn_cp_sizes(generator)
    times_2RPVM = generator.uniform(1.0, 9.0, (2, *SHAPE_RPVM))
    times_2RPVM[generator.random(times_2RPVM.shape) < missing] = np.nan
    before = times_2RPVM.copy()
    found = step_measurement(times_2RPVM).without_waiting(micro_batches(cp_sizes_RM)).times_2RPVM
    np.testing.assert_array_equal(times_2RPVM, before)
    for direction, rank, stage, chunk, position in np.ndindex(before.shape):
        first = rank - rank % cp_sizes_RM[rank, position]
        members = range(first, first + cp_sizes_RM[rank, position])
        known = [before[direction, r, stage, chunk, position] for r in members]
        known = [value for value in known if not np.isnan(value)]
        value = found[direction, rank, stage, chunk, position]
        assert np.isnan(value) if not known else value == min(known)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]))
def test_whoever_comes_last_to_a_collective_waits_for_nobody(seed: int, members: int) -> None:
    """Ranks compute, meet, and go on together; the exchange itself takes all of them as long."""
    generator = np.random.default_rng(seed)
    ranks, shape = 4, (1, 2, 3, 2, 5, PASSES)
    work = generator.uniform(0.0, 9.0, (ranks // members, members, *shape))
    exchange = generator.uniform(0.0, 1.0, (ranks // members, 1, *shape))
    inside = work.max(axis=1, keepdims=True) - work + exchange
    inside_RPVMYXZ, own_RPVMYXZ = (
        each.reshape(ranks, *shape) for each in (inside, work + exchange)
    )

    def in_all(times_RPVMYXZ: np.ndarray) -> np.ndarray:
        of_passes = times_RPVMYXZ.sum(axis=(-3, -2))
        return np.stack([of_passes[..., 0], of_passes[..., 1:].sum(axis=-1)])

    passed_2RPVM = in_all((work + inside).reshape(ranks, *shape))
    waiting_2RPVM = lockstep_waiting(inside_RPVMYXZ, members)
    np.testing.assert_allclose(passed_2RPVM - waiting_2RPVM, in_all(own_RPVMYXZ))

    inside_RPVMYXZ[0, 0, 0, 0, 0, 0, 0] = np.nan
    unknown = np.isnan(lockstep_waiting(inside_RPVMYXZ, members))
    assert unknown[0, :members, 0, 0, 0].all()
    assert unknown.sum() == members


def scalars(planned: Any, measured: Any) -> dict[str, float]:
    return StepFigures.of(planned, measured).scalars()


def test_a_step_as_predicted_measures_what_it_predicted() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    values = scalars(planned, measured)
    assert values["imbalance-predicted"] > 1.01, "a case that balances by chance tests nothing"
    assert values["makespan-ms-measured"] == pytest.approx(values["makespan-ms-predicted"])
    assert values["predicted-error"] == pytest.approx(0.0, abs=1e-12)
    for stage in range(JOB.pipeline_stages):
        assert values[f"relative-time-stage-{stage}"] == pytest.approx(1.0)
        busy_D = (measured.times_2RPVM[0] + measured.times_2RPVM[1])[:, stage].sum(axis=(1, 2))
        idle_D = 1.0 - busy_D / np.array(planned.plan.expectation.rank_makespan_ms)
        assert values[f"bubble-fraction-stage-{stage}"] == pytest.approx(idle_D.mean())
    assert values["relative-time-max"] == pytest.approx(1.0)
    busy_ms = float((measured.times_2RPVM[0] + measured.times_2RPVM[1]).sum())
    stages = JOB.data_parallel_size * JOB.pipeline_stages
    available_ms = stages * planned.plan.expectation.makespan_ms
    assert values["waiting-share"] == pytest.approx(1.0 - busy_ms / available_ms)


def test_a_slow_device_shows_although_its_samples_are_short() -> None:
    planned = planned_step()
    work_D = np.sum(planned.plan.expectation.times_2RPVM[0], axis=(1, 2, 3))
    light = int(work_D.argmin())
    measured = slowed_down(measured_as_planned(planned), light, 1, 1.2)
    values = scalars(planned, measured)
    # Three ratios of 1 and one of 1.2.
    assert values["relative-time-max"] == pytest.approx(1.2 / 1.05)
    assert values["relative-time-stage-0"] == pytest.approx(1.0 / 1.05)
    assert values["relative-time-stage-1"] == pytest.approx(1.1 / 1.05)


def test_a_stage_that_calibration_knows_to_be_slow_still_shows() -> None:
    scales = StageScales.of(np.array([[[1.0, 1.0], [1.5, 1.5]], [[1.0, 1.0], [1.5, 1.5]]]))
    planned = planned_step(scales)
    values = scalars(planned, measured_as_planned(planned))
    assert values["predicted-error"] == pytest.approx(0.0, abs=1e-12)
    assert values["relative-time-stage-0"] == pytest.approx(1.0 / 1.25)
    assert values["relative-time-stage-1"] == pytest.approx(1.5 / 1.25)


def test_a_device_that_plans_hold_for_slow_still_shows() -> None:
    slowness_RP = np.ones((JOB.data_parallel_size, JOB.pipeline_stages))
    slowness_RP[0, 1] = 1.2
    planned = planned_step(
        replace(StageScales.ones(JOB.pipeline_stages, JOB.virtual_stages), slowness_RP=slowness_RP)
    )
    values = scalars(planned, measured_as_planned(planned))
    assert values["predicted-error"] == pytest.approx(0.0, abs=1e-12)
    assert values["relative-time-max"] == pytest.approx(1.2 / (1.0 + 0.2 / slowness_RP.size))
    assert values["slowness-planned-max"] == pytest.approx(1.2)


def test_the_log_line_has_counts_where_they_are_not_zero() -> None:
    planned = planned_step()
    measured = slowed_down(measured_as_planned(planned), 0, 0, 3.0)
    busy_R, expected_R = map(
        rank_busy_ms, (measured.times_2RPVM, planned.plan.expectation.times_2RPVM)
    )
    expected = {
        "imbalance": pytest.approx(max(busy_R) * 2 / sum(busy_R)),
        "predicted-to-measured": pytest.approx(max(expected_R) / max(busy_R)),
        "coverage": pytest.approx(0.45),
        "tuned-samples": 0.0,
    }
    figures = StepFigures.of(planned, measured)
    assert figures.log_line() == expected
    assert replace(figures, unobserved=2).log_line() == expected | {"unobserved": 2.0}
    assert not figures.log_line().keys() & figures.scalars().keys()


def scalars_of(planned: Any, measured: Any, iteration_ms: float | None = 500.0) -> dict[str, float]:
    step = finished_step(
        planned, measured, iteration_ms=iteration_ms, host_ms={"plan": 1.0, "hooks": 0.5}
    )
    return step_scalars(step, shape=SHAPE, block_size=BLOCK_SIZE, world_size=4)


def test_coverage_budgets_and_speed() -> None:
    planned = planned_step()
    values = scalars_of(planned, measured_as_planned(planned))
    assert values["coverage-base"] == pytest.approx(0.45)
    assert values["coverage-min"] == 0.1
    assert {values[f"budget-blocks-{what}"] for what in ("mean", "min", "max")} == {4.0}
    assert (values["plan-ms"], values["host-ms"]) == (3.0, 1.5)
    assert values["tokens-per-second"] == pytest.approx(sum(LENGTHS_TOKENS) / 0.5)
    executed = values["tflops-per-rank-executed"]
    assert executed > 0.0
    slower = scalars_of(planned, measured_as_planned(planned), iteration_ms=1000.0)
    assert slower["tflops-per-rank-executed"] == pytest.approx(executed / 2)


def test_wandb_gets_what_was_measured_of_a_step_at_once() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    unmeasured = replace(measured, schedule_ms=np.full_like(measured.schedule_ms, math.nan))
    values = scalars_of(planned, unmeasured, iteration_ms=None)
    wandb = Mock()
    write_scalars((None, wandb, 5), 10, values)
    ((logged, step),) = (call.args for call in wandb.log.call_args_list)
    assert step == 10
    assert all(math.isfinite(value) for value in logged.values())
    missing = scalars_of(planned, measured).keys() - values.keys()
    assert {f"sparse-balance/{name}" for name in values} == logged.keys()
    assert missing == {
        "makespan-ms-measured",
        "bubble-fraction-stage-0",
        "bubble-fraction-stage-1",
        "waiting-share",
        "tokens-per-second",
        "tflops-per-rank-executed",
    }
