# SPDX-License-Identifier: Apache-2.0
"""Plans follow what was known when they were made, on demand, ahead and after a resume; evaluation
is placed as training is; batches may grow."""

import itertools
import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learn.scheduler_cases import GLOBAL_BATCH, JOB, make_scheduler
from learn.scheduler_cases import index as index  # a fixture
from plan.plan_cases import job_shape, random_lengths
from step_cases import step_measurement

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.scheduler import BatchSizes, Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.plan.step_plan import StepPlan

STEPS = 6


class LateExecutor(Executor):
    """Runs nothing until its result is wanted: the slowest worker there could be."""

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Future:
        class Late(Future):
            def result(self, timeout: float | None = None) -> Any:
                return function(*arguments, **keywords)

            def exception(self, timeout: float | None = None) -> None:
                return None

        return Late()


def measurement(schedule: Scheduler, step: int) -> StepMeasurement:
    """Each step raises the curves; stage 1 is twice as slow as predicted."""
    expectation = schedule.planned(step).plan.expectation
    slow_P11 = np.array([1.0, 2.0])[:, None, None]
    grid = np.asarray(schedule.planner.coverage.grid, dtype=np.float64)
    curve_K = np.minimum(grid / grid[-1], 1.0) ** (0.6 / (step + 1))
    return step_measurement(
        expectation.times_2RPVM * slow_P11,
        sums_LUK=np.broadcast_to(curve_K, schedule.planner.coverage.mean_LUK.shape),
        counts_LU=np.ones(schedule.planner.coverage.observed_LU.shape),
        executed_L=np.ones(schedule.job.layers),
        base_sum=1.0,
    )


def run(schedule: Scheduler, steps: range) -> list[bytes]:
    digests = []
    for step in steps:
        digests.append(schedule.planned(step).plan.digest())
        schedule.plan_following(step)
        schedule.finish_step(step, measurement(schedule, step))
    return digests


@pytest.fixture
def worker() -> Any:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_plan_made_ahead_knows_what_was_known_a_step_earlier(
    index: SampleIndex, worker: Executor
) -> None:
    ahead = make_scheduler(index, worker)
    known = [ahead.state_dict(), ahead.state_dict()]
    plans = []
    for step in range(STEPS):
        plans.append(ahead.planned(step).plan.digest())
        ahead.plan_following(step)
        on_demand = make_scheduler(index)
        on_demand.load_state_dict(known[step])
        assert on_demand.planned(step).plan.digest() == plans[step]
        ahead.finish_step(step, measurement(ahead, step))
        known.append(ahead.state_dict())
    assert len(set(plans)) == STEPS


def test_ranks_with_fast_and_slow_planners_agree(
    index: SampleIndex, worker: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is never asked for a plan early."""
    digests = run(make_scheduler(index, worker), range(STEPS))
    assert run(make_scheduler(index, LateExecutor()), range(STEPS)) == digests
    monkeypatch.setattr(Scheduler, "plan_following", lambda schedule, step: None)
    assert run(make_scheduler(index, worker), range(STEPS)) == digests


def test_the_following_step_is_planned_once_and_not_before_it_is_asked_for(
    index: SampleIndex,
) -> None:
    worker = Mock(wraps=LateExecutor())
    schedule = make_scheduler(index, worker)
    schedule.plan_following(0)
    schedule.planned(0)
    worker.submit.assert_not_called()
    schedule.plan_following(0)
    schedule.plan_following(0)
    worker.submit.assert_called_once()


def test_the_step_that_runs_and_the_next_are_kept(index: SampleIndex, worker: Executor) -> None:
    schedule = make_scheduler(index, worker)
    run(schedule, range(STEPS))
    assert sorted(schedule._planned) == [STEPS - 2, STEPS - 1]
    assert schedule.planned(STEPS - 1).micro_batches == JOB.micro_batches
    assert schedule.state_dict()["consumed_samples"] == STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("planned_ahead", [True, False])
def test_a_restored_scheduler_goes_on_as_if_never_stopped(
    index: SampleIndex, worker: Executor, planned_ahead: bool
) -> None:
    def make() -> Scheduler:
        return make_scheduler(index, worker if planned_ahead else None)

    whole = run(make(), range(STEPS))
    for stop in range(1, STEPS):
        first, second = make(), make()
        begun = run(first, range(stop))
        assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == ()
        assert begun + run(second, range(stop, STEPS)) == whole


def test_state_of_planning_ahead_loads_on_demand_and_back(
    index: SampleIndex, worker: Executor
) -> None:
    ahead, on_demand = make_scheduler(index, worker), make_scheduler(index)
    run(ahead, range(3))
    on_demand.load_state_dict(ahead.state_dict())
    assert on_demand.state_dict()["next_plan"] is None
    assert on_demand.state_dict()["coverage"] == ahead.state_dict()["coverage"]
    ahead.load_state_dict(on_demand.state_dict())
    on_demand.planned(3)
    assert ahead.planned(3).plan.digest() == on_demand.planned(3).plan.digest()


def test_waiting_and_planning_are_told_apart(index: SampleIndex) -> None:
    """The clock ticks once a reading: a plan takes 1 s, waiting for a finished one 1 s too."""
    on_demand = make_scheduler(index, clock=itertools.count().__next__).planned(0)
    assert on_demand.plan_ms == 1000.0
    assert on_demand.wait_ms == 3000.0


def test_errors_of_planning_ahead_reach_the_step_that_needs_the_plan(index: SampleIndex) -> None:
    future: Future = Future()
    future.set_exception(PlanError("step 1 has no plan"))
    schedule = make_scheduler(index, Mock(**{"submit.return_value": future}))
    schedule.planned(0)
    schedule.plan_following(0)
    with pytest.raises(PlanError, match="step 1 has no plan"):
        schedule.planned(1)


class InOrder:
    """Samples in the order of their numbers."""

    def __init__(self, lengths_tokens: list[int]) -> None:
        self.lengths_tokens = np.array(lengths_tokens)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        return np.arange(first, first + size)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return self.lengths_tokens[samples]


def planned(lengths: list[int], *, dense: bool = False, **choices: Any) -> StepPlan:
    """The second step of 16 samples, of four micro-batches on every rank."""
    job, index = job_shape(2, 4, 2), InOrder(lengths)
    training = make_scheduler(index, job=job, batch_sizes=16, max_blocks=2048, **choices)
    found = training.for_evaluation(index, job, 16, dense=dense).planned(1)
    assert found.samples.tolist() == list(range(16, 32))
    return found.plan


@pytest.mark.parametrize("dense", [False, True])
def test_evaluation_is_balanced_at_one_budget(dense: bool) -> None:
    lengths = random_lengths(32, 2)
    plan = planned(lengths, dense=dense)
    arrived = planned(lengths, dense=dense, batching="arrival")
    assert plan.expectation.makespan_ms < arrived.expectation.makespan_ms
    budget = 2048 if dense else 6
    assert all((micro_batch.budgets_LS == budget).all() for micro_batch in plan.micro_batches)


def test_a_sample_above_the_cap_lies_on_several_ranks() -> None:
    lengths = [200] * 31 + [1900]
    plan = planned(
        lengths, max_tokens_per_micro_batch=1000, max_cp_size=2, context_parallel="dynamic"
    )
    assert max(micro_batch.cp_size for micro_batch in plan.micro_batches) == 2
    assert plan.rank_tokens_RM().max() <= 1000


@pytest.mark.parametrize("batching", ["makespan", "arrival", "length"])
def test_a_batch_that_fits_under_no_cap_runs_above_it(batching: str) -> None:
    with pytest.warns(UserWarning, match="above the cap"):
        plan = planned([500] * 32, max_tokens_per_micro_batch=900, batching=batching)
    assert plan.rank_tokens_RM().max() == 1000


def test_samples_that_arrive_unevenly_keep_the_cap() -> None:
    """Two samples of a micro-batch in order of arrival are above it."""
    lengths = [100, 100] * 8 + [600, 600, 100, 100] * 4
    assert planned(lengths, max_tokens_per_micro_batch=800).rank_tokens_RM().max() <= 800


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
        if samples in begins:
            assert sizes.step_at(samples) == begins[samples]
            continue
        with pytest.raises(StateError, match=r"no step of --step-batch|no multiple of --global"):
            sizes.step_at(samples)
    walked = [sizes.size_of(step) for step in range(3, 40)]
    assert sizes.sizes_from(3)[: len(set(walked))] == tuple(dict.fromkeys(walked))


@pytest.mark.parametrize("schedule", [(), ((4, 8),), ((0, 8), (0, 4)), ((0, 0),)])
def test_what_is_no_schedule_is_refused(schedule: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="thresholds must rise from 0"):
        BatchSizes(schedule=schedule)


def scheduled(index: SampleIndex, *schedule: tuple[int, int]) -> Scheduler:
    job = job_shape(2, max(size for _, size in schedule) // 2, stages=2)
    return make_scheduler(index, job=job, batch_sizes=schedule)


def test_every_step_plans_the_samples_that_megatron_counts(index: SampleIndex) -> None:
    schedule = scheduled(index, (0, 2), (4, 6), (13, 8))
    consumed = 0
    for step, size in enumerate([2, 2, 6, 6, 8, 8]):
        planned = schedule.planned(step)
        assert planned.samples.tolist() == index.global_batch(consumed, size).tolist()
        assert planned.micro_batches == size // 2
        consumed += size
    schedule._finished_step = 2
    state = schedule.state_dict()
    assert state["consumed_samples"] == 10
    resumed = scheduled(index, (0, 2), (4, 6), (13, 8))
    assert resumed.load_state_dict(state) == ()
    assert resumed._finished_step == 2
    with pytest.raises(StateError, match=r"10 samples, no multiple of --global-batch-size 4"):
        scheduled(index, (0, 4)).load_state_dict(state)


def test_a_size_that_does_not_fill_its_micro_batches_is_named(index: SampleIndex) -> None:
    with pytest.raises(ConfigError, match=r"step 0: .*size 3 must be a multiple of .* 2"):
        scheduled(index, (0, 3), (6, 8)).planned(0)
