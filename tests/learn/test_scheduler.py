# SPDX-License-Identifier: Apache-2.0
"""Plans follow what was known when they were made: on demand, ahead, and after a resume."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learn.scheduler_cases import BLOCK_TOKENS, GLOBAL_BATCH, JOB, scheduler
from learn.scheduler_cases import index as index  # a fixture
from step_cases import step_measurement

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_plan import PlanError, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs

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


def measurement(schedule: Scheduler, rise: int, step: int | None = None) -> StepMeasurement:
    """Measurement of step ``rise`` or another; ``rise`` raises curves; stage 1 is twice as slow."""
    expectation = schedule.planned(rise if step is None else step).plan.expectation
    slow_P11 = np.array([1.0, 2.0])[:, None, None]
    grid = np.asarray(schedule.coverage.grid, dtype=np.float64)
    curve_K = np.minimum(grid / grid[-1], 1.0) ** (0.6 / (rise + 1))
    buckets = schedule.coverage.buckets
    lost_U = 0.02 * np.cos(rise + np.arange(buckets))
    return step_measurement(
        expectation.times_2RPVM * slow_P11,
        sums_LUK=np.broadcast_to(curve_K, schedule.coverage.mean_LUK.shape),
        counts_LU=np.ones(schedule.coverage.observed_LU.shape),
        executed_L=np.ones(schedule.job.layers),
        executed_sum=1.0,
        base_sum=1.0,
        count=1.0,
        lengths_3U=np.array([1.0 - lost_U, np.ones(buckets), np.ones(buckets)]) / buckets,
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
    ahead = scheduler(index, worker)
    known = [ahead.state_dict(), ahead.state_dict()]
    plans = []
    for step in range(STEPS):
        plans.append(ahead.planned(step).plan.digest())
        ahead.plan_following(step)
        on_demand = scheduler(index, None)
        on_demand.load_state_dict(known[step])
        assert on_demand.planned(step).plan.digest() == plans[step]
        ahead.finish_step(step, measurement(ahead, step))
        known.append(ahead.state_dict())
    assert len(set(plans)) == STEPS


def test_ranks_with_fast_and_slow_planners_agree(index: SampleIndex, worker: Executor) -> None:
    assert run(scheduler(index, worker), range(STEPS)) == run(
        scheduler(index, LateExecutor()), range(STEPS)
    )


def test_a_plan_that_nobody_asked_for_early_is_the_same(
    index: SampleIndex, worker: Executor
) -> None:
    late = scheduler(index, worker)
    digests = []
    for step in range(STEPS):
        digests.append(late.planned(step).plan.digest())
        late.finish_step(step, measurement(late, step))
    assert digests == run(scheduler(index, worker), range(STEPS))


def test_the_following_step_is_planned_once_and_not_before_it_is_asked_for(
    index: SampleIndex,
) -> None:
    class Counting(LateExecutor):
        submitted = 0

        def submit(self, *arguments: Any, **keywords: Any) -> Future:
            Counting.submitted += 1
            return super().submit(*arguments, **keywords)

    schedule = scheduler(index, Counting())
    schedule.plan_following(0)
    schedule.planned(0)
    assert Counting.submitted == 0
    schedule.plan_following(0)
    schedule.plan_following(0)
    assert Counting.submitted == 1


def test_the_step_that_runs_and_the_next_are_kept(index: SampleIndex, worker: Executor) -> None:
    schedule = scheduler(index, worker)
    run(schedule, range(STEPS))
    assert sorted(schedule._planned) == [STEPS - 2, STEPS - 1]
    assert schedule.planned(STEPS - 1).micro_batches == JOB.micro_batches
    assert schedule.state_dict()["consumed_samples"] == STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("planned_ahead", [True, False])
@pytest.mark.parametrize("mean_over", ["samples", "length-buckets"])
def test_a_restored_scheduler_goes_on_as_if_never_stopped(
    index: SampleIndex, worker: Executor, planned_ahead: bool, mean_over: str
) -> None:
    def make() -> Scheduler:
        choices = {"coverage_target": "base", "coverage_mean_over": mean_over}
        return scheduler(index, worker if planned_ahead else None, **choices)

    whole = run(make(), range(STEPS))
    for stop in range(1, STEPS):
        first, second = make(), make()
        begun = run(first, range(stop))
        assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == ()
        assert begun + run(second, range(stop, STEPS)) == whole


def test_an_account_of_another_number_of_means_starts_afresh(index: SampleIndex) -> None:
    """Nothing else does, and the next plan is made anew."""
    first = scheduler(index, LateExecutor(), coverage_target="base")
    run(first, range(3))
    by_length = {"coverage_target": "base", "coverage_mean_over": "length-buckets"}
    second = scheduler(index, LateExecutor(), **by_length)
    (afresh,) = second.load_state_dict(first.state_dict())
    assert afresh.startswith("coverage_balance starts afresh: the checkpoint holds 1 means")
    assert second.state_dict()["next_plan"] is None
    assert second.state_dict()["coverage"] == first.state_dict()["coverage"]
    assert not any(second.state_dict()["coverage_balance"]["deficit"])
    second.planned(3)


def test_state_of_planning_ahead_loads_on_demand_and_back(
    index: SampleIndex, worker: Executor
) -> None:
    ahead, on_demand = scheduler(index, worker), scheduler(index, None)
    run(ahead, range(3))
    on_demand.load_state_dict(ahead.state_dict())
    assert on_demand.state_dict()["next_plan"] is None
    assert on_demand.state_dict()["coverage"] == ahead.state_dict()["coverage"]
    ahead.load_state_dict(on_demand.state_dict())
    on_demand.planned(3)
    assert ahead.planned(3).plan.digest() == on_demand.planned(3).plan.digest()


def test_waiting_and_planning_are_told_apart(index: SampleIndex, worker: Executor) -> None:
    """The clock ticks once a reading: a plan takes 1 s, waiting for a finished one 1 s too."""
    on_demand = scheduler(index, None).planned(0)
    assert on_demand.plan_ms == 1000.0
    assert on_demand.wait_ms == 3000.0


@pytest.mark.parametrize("planned_ahead", [True, False])
@pytest.mark.parametrize(
    ("global_batch_size", "steps_per_horizon", "lost"), [(8, 8, 0.3), (128, 1, 0.02)]
)
def test_coverage_lost_in_steps_is_made_up_for_in_the_next_horizon(
    index: SampleIndex,
    worker: Executor,
    planned_ahead: bool,
    global_batch_size: int,
    steps_per_horizon: int,
    lost: float,
) -> None:
    """Spread over the horizon; where that is one step, half of it, for a second one pays too.

    Nothing enters the account after the first step, so all that follow pay the same on average.
    Steps that gain coverage without it pay less.
    """
    expected = []
    for short in (0.0, lost):
        schedule = scheduler(
            index,
            worker if planned_ahead else None,
            global_batch_size=global_batch_size,
            tuning="makespan",
            coverage_target="base",
        )
        means = []
        for step in range(3 * STEPS):
            keep_account(schedule, step, executed=-short if step == 0 else 0.0)
            means.append(schedule.planned(step).plan.expectation.coverage_mean)
        assert schedule.state_dict()["coverage_balance"]["deficit"] == pytest.approx(
            [short * global_batch_size]
        )
        expected.append(np.mean(means[STEPS:]))
    repaid = lost / max(2, steps_per_horizon)
    assert repaid / 3 < expected[1] - expected[0] < 2 * repaid


@pytest.mark.parametrize("planned_ahead", [True, False])
def test_coverage_saved_in_steps_may_be_spent_in_later_ones_half_at_a_time(
    index: SampleIndex, worker: Executor, planned_ahead: bool
) -> None:
    """Two plans may be made before the first is executed: together they spend what there is."""
    saved = 0.04
    expected = []
    for savings in (0.0, saved):
        schedule = scheduler(
            index,
            worker if planned_ahead else None,
            global_batch_size=128,
            tuning="makespan",
            coverage_target="base",
        )
        for step in range(STEPS):
            keep_account(schedule, step, executed=savings if step == 0 else 0.0)
        assert schedule.state_dict()["coverage_balance"]["deficit"] == pytest.approx(
            [-savings * 128]
        )
        expected.append(schedule.planned(STEPS).plan.expectation.coverage_mean)
    assert base_mean(schedule, STEPS) - saved / 2 - 1e-9 <= expected[1] < expected[0]


def keep_account(schedule: Scheduler, step: int, *, executed: float) -> None:
    """Run a step whose executed coverage is so much above that of base budgets.

    Every layer and length has another curve: at equal prices budgets would move all at once.
    """
    measured = measurement(schedule, 0, step)
    grid = np.asarray(schedule.coverage.grid, dtype=np.float64)
    shape = schedule.coverage.observed_LU.shape
    exponents_LU1 = np.linspace(0.3, 0.9, shape[0] * shape[1]).reshape(*shape, 1)
    coverage = replace(
        measured.coverage,
        sums_LUK=np.minimum(grid / grid[-1], 1.0) ** exponents_LU1,
        executed_sum=measured.coverage.base_sum + executed,
    )
    schedule.plan_following(step)
    schedule.finish_step(step, replace(measured, coverage=coverage))


def test_small_global_batches_look_ahead_to_the_samples_of_later_steps(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan depends on what comes later, and on nothing beyond the horizon."""
    from sparsebalance_megatron.learn import step_planner as module

    asked: list[list[int]] = []

    def recording(step: int, inputs: PlanInputs) -> StepPlan:
        asked.append(list(inputs.later_lengths_tokens))
        return plan_step(step, inputs)

    monkeypatch.setattr(module, "plan_step", recording)
    scheduler(index, None, tuning="makespan", coverage_target="base").planned(3)
    later = index.lengths_of(index.global_batch(4 * GLOBAL_BATCH, 7 * GLOBAL_BATCH))
    assert asked == [later.tolist()]


def base_mean(schedule: Scheduler, step: int) -> float:
    """Expected coverage of a step's samples at base budgets."""
    micro_batches = schedule.planned(step).plan.micro_batches
    lengths = [n for micro_batch in micro_batches for n in micro_batch.lengths_tokens]
    blocks_S = -(-np.array(lengths) // BLOCK_TOKENS)
    base_S = np.minimum(schedule._planner.plan_settings.base_budget, blocks_S)
    base_LS = np.broadcast_to(base_S, (JOB.layers, len(base_S)))
    return float(schedule.coverage.coverage_LS(blocks_S, base_LS).mean())


def test_errors_of_planning_ahead_reach_the_step_that_needs_the_plan(index: SampleIndex) -> None:
    class Failing(Executor):
        def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Future:
            future: Future = Future()
            future.set_exception(PlanError(f"step {arguments[0]} has no plan"))
            return future

    schedule = scheduler(index, Failing())
    schedule.planned(0)
    schedule.plan_following(0)
    with pytest.raises(PlanError, match="step 1 has no plan"):
        schedule.planned(1)
