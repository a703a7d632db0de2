# SPDX-License-Identifier: Apache-2.0
"""Sizes of steps against Megatron's own calculator, walked through step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learn.scheduler_cases import index as index  # a fixture
from learn.scheduler_cases import make_scheduler
from plan.plan_cases import job_shape

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.scheduler import BatchSizes, Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.plan.step_plan import PlanError

schedules = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=4).map(
    lambda pairs: tuple(sorted({0: 5, **dict(pairs)}.items()))
)


def megatrons(schedule: tuple[tuple[int, int], ...]) -> Any:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    return StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=1,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=1,
        schedule=" ".join(f"{threshold}:{size}" for threshold, size in schedule),
    )


@given(schedule=schedules)
def test_steps_are_those_that_megatron_walks_through(schedule: tuple[tuple[int, int], ...]) -> None:
    calculator, sizes = megatrons(schedule), BatchSizes(schedule=schedule)
    consumed, begins = 0, {}
    for step in range(40):
        calculator.update(consumed, consistency_check=False)
        size = calculator.get_current_global_batch_size()
        assert (sizes.first_sample(step), sizes.size_of(step)) == (consumed, size)
        begins[consumed] = step
        consumed += size
    for samples in range(consumed):
        assert sizes.step_at(samples) == begins.get(samples)
    walked = [sizes.size_of(step) for step in range(3, 40)]
    assert sizes.sizes_from(3)[: len(set(walked))] == tuple(dict.fromkeys(walked))


def test_a_fixed_size_has_one_phase() -> None:
    sizes = BatchSizes.constant(8)
    assert [sizes.first_sample(step) for step in (0, 1, 10**9)] == [0, 8, 8 * 10**9]
    assert (sizes.step_at(24), sizes.step_at(25)) == (3, None)


@pytest.mark.parametrize("schedule", [(), ((4, 8),), ((0, 8), (0, 4)), ((0, 0),)])
def test_what_is_no_schedule_is_refused(schedule: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="thresholds must rise from 0"):
        BatchSizes(schedule=schedule)


def scheduler(index: SampleIndex, *schedule: tuple[int, int]) -> Scheduler:
    job = job_shape(2, max(size for _, size in schedule) // 2, stages=2)
    return make_scheduler(index, job=job, batch_sizes=schedule)


def test_every_step_plans_the_samples_that_megatron_counts(index: SampleIndex) -> None:
    schedule = scheduler(index, (0, 2), (4, 6), (13, 8))
    consumed = 0
    for step, size in enumerate([2, 2, 6, 6, 8, 8]):
        planned = schedule.planned(step)
        assert planned.samples.tolist() == index.global_batch(consumed, size).tolist()
        assert planned.micro_batches == size // 2
        consumed += size
    schedule._finished_step = 2
    state = schedule.state_dict()
    assert state["consumed_samples"] == 10
    resumed = scheduler(index, (0, 2), (4, 6), (13, 8))
    assert resumed.load_state_dict(state) == ()
    assert resumed._finished_step == 2
    with pytest.raises(StateError, match="after which no step begins"):
        scheduler(index, (0, 4)).load_state_dict(state)


def test_a_size_that_does_not_fill_its_micro_batches_is_named(index: SampleIndex) -> None:
    with pytest.raises(ConfigError, match=r"step 0: .*size 3 must be a multiple of .* 2"):
        scheduler(index, (0, 3), (6, 8)).planned(0)
