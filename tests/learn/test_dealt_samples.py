# SPDX-License-Identifier: Apache-2.0
"""Windows of a run: nothing is lost or trained twice, whatever the sizes, the stops and the
changes; a resumed run goes on as if it had not stopped."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learn.test_scheduler import InOrder, schedules

from sparsebalance_megatron.learn.dealt_samples import DealtSamples
from sparsebalance_megatron.learn.scheduler import BatchSizes
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.plan.windows import Windows

STEPS = 40
INDEX = InOrder(np.random.default_rng(0).integers(1, 5000, 2000).tolist())

WINDOWS = Windows(4, 0.25, 1234)
choices = st.builds(Windows, st.integers(1, 9), st.sampled_from([0.25, 0.5]), st.just(1234))


def dealt(
    sizes: BatchSizes, windows: Windows, step: int = 0, warm_up: int = 0, saved: Any = None
) -> DealtSamples:
    return DealtSamples.from_step(
        INDEX, sizes, windows, step=step, warm_up_samples=warm_up, saved=saved
    )


def steps_of(order: DealtSamples, steps: range) -> list[list[int]]:
    sizes = order.batch_sizes
    return [
        order.global_batch(sizes.first_sample(step), sizes.size_of(step)).tolist() for step in steps
    ]


def saved_window(order: DealtSamples, step: int) -> Any:
    """Of a checkpoint before a step, as it comes back."""
    return json.loads(json.dumps(order.state(step))).get("window")


@given(
    schedule=schedules,
    plans=st.lists(st.tuples(choices, st.integers(1, 13)), min_size=1, max_size=4),
    warm_up=st.integers(0, 60),
)
def test_changes_of_windows_lose_nothing_and_repeat_nothing(
    schedule: tuple[tuple[int, int], ...], plans: list[tuple[Windows, int]], warm_up: int
) -> None:
    """After each change the run goes on for some steps, in the end to the end of a window."""
    sizes, found, step, saved = BatchSizes(schedule=schedule), [], 0, None
    for windows, steps in plans:
        order = dealt(sizes, windows, step, warm_up, saved)
        found += steps_of(order, range(step, step + steps))
        step += steps
        saved = saved_window(order, step)
    while saved is not None:
        found += steps_of(order, range(step, step + 1))
        step += 1
        saved = saved_window(order, step)
    assert list(map(len, found)) == [sizes.size_of(each) for each in range(step)]
    assert sorted(sample for step in found for sample in step) == list(
        range(sizes.first_sample(step))
    )


@given(schedule=schedules, windows=choices, warm_up=st.integers(0, 60), stop=st.integers(1, 30))
def test_a_resumed_run_goes_on_as_if_never_stopped(
    schedule: tuple[tuple[int, int], ...], windows: Windows, warm_up: int, stop: int
) -> None:
    sizes = BatchSizes(schedule=schedule)
    whole = dealt(sizes, windows, 0, warm_up)
    resumed = dealt(sizes, windows, stop, warm_up, saved_window(whole, stop))
    assert steps_of(resumed, range(stop, STEPS)) == steps_of(whole, range(stop, STEPS))
    for step in range(stop, STEPS):
        assert resumed.state(step) == whole.state(step)
        assert resumed.window_of(step)[:2] == whole.window_of(step)[:2]


@given(schedule=schedules, windows=choices, warm_up=st.integers(0, 60))
def test_windows_are_cut_where_they_must_be(
    schedule: tuple[tuple[int, int], ...], windows: Windows, warm_up: int
) -> None:
    sizes = BatchSizes(schedule=schedule)
    order, step = dealt(sizes, windows, 0, warm_up), 0
    while step < STEPS:
        first, steps, _ = order.window_of(step)
        held = range(first, first + steps)
        assert first == step and {order.window_of(each) for each in held} == {order.window_of(step)}
        assert len({sizes.size_of(each) for each in held}) == 1
        in_warm_up = sizes.first_sample(step) < warm_up
        changes = sizes.phase_of(step).end_step == step + steps
        assert steps == 1 if in_warm_up else steps == windows.steps or changes
        assert "version" not in order.state(step)
        step += steps


def test_a_step_says_how_far_its_samples_moved() -> None:
    order = dealt(BatchSizes.constant(8), WINDOWS)
    for step in range(8):
        described = order.step_window(step)
        samples = np.array(steps_of(order, range(step, step + 1))[0])
        assert (described.number, described.steps) == (step % 4, 4)
        assert described.steps_moved == np.mean(np.abs(samples // 8 - step))
        assert described.sample_tokens == INDEX.lengths_of(samples).sum()
        assert described.steps_moved > 0


def test_a_window_that_cannot_be_ended_is_refused() -> None:
    order = dealt(BatchSizes.constant(8), WINDOWS)
    saved = saved_window(order, 6)
    assert order.state(6)["version"] == 7
    with pytest.raises(StateError, match=r"4 steps of 8 samples, .*--global-batch-size"):
        dealt(BatchSizes.constant(16), WINDOWS, 3, 0, saved)
    with pytest.raises(StateError, match="middle of a window"):
        dealt(BatchSizes.constant(8), WINDOWS, 9, 0, saved)
    for wrong in ([32, 10**12, 8, 0.25], [32, 4, 0, 0.25], [None, 4, 8, 0.25], 4):
        with pytest.raises(StateError, match=r"middle of a window .*--finetune"):
            dealt(BatchSizes.constant(8), WINDOWS, 6, 0, wrong)
