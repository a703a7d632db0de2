# SPDX-License-Identifier: Apache-2.0
"""Recording of micro-batch times by timers, against a clock that tests wind, and of collectives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from sparsebalance_megatron.megatron.timing import (
    BACKWARD_TIMER,
    COLLECTIVES_PER_LAYER,
    FORWARD_TIMER,
    MicroBatchRecorder,
    RecordingTimers,
    watch_expert_collectives,
)
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule, megatron_order
from sparsebalance_megatron.run.run import HostTime, backward_order

UNIX_S = 1.75e9


class WoundClock:
    """Marks are ms set by the test."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


class SilentTimers:
    """Megatron's dummy timers: above the log level they do nothing."""

    log_level = 0

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(start=lambda barrier=False: None, stop=lambda barrier=False: None)


def recorder_for(stages: int, virtual: int, micro_batches: int, stage: int):
    operations = megatron_order(stages, micro_batches, virtual).by_stage[stage]
    order = [(each.direction, each.chunk, each.micro_batch) for each in operations]
    clock = WoundClock()
    recorder = MicroBatchRecorder(clock, unix_clock=lambda: UNIX_S + clock.now_ms / 1e3)
    recorder.backward_order = [(c, m, 0) for kind, c, m in order if kind == "backward"]
    return order, clock, recorder


def run(order, clock, recorder, duration_ms) -> None:
    timers = RecordingTimers(SilentTimers(), recorder)
    for kind, chunk, micro_batch in order:
        name = FORWARD_TIMER if kind == "forward" else BACKWARD_TIMER
        timers(name, log_level=2).start()
        if kind == "forward":
            recorder.bind_forward(chunk, micro_batch)
        clock.now_ms += duration_ms(kind, chunk, micro_batch)
        timers(name).stop()
        clock.now_ms += 1000.0


@pytest.mark.parametrize(
    ("stages", "virtual", "micro_batches"), [(1, 1, 3), (2, 1, 4), (2, 2, 4), (4, 2, 8)]
)
def test_times_land_on_their_micro_batch(stages: int, virtual: int, micro_batches: int) -> None:
    """Other timers do not count."""

    def duration_ms(kind: str, chunk: int, micro_batch: int) -> float:
        return (1.0 if kind == "forward" else 100.0) + 10 * chunk + micro_batch

    for stage in range(stages):
        order, clock, recorder = recorder_for(stages, virtual, micro_batches, stage)
        timers = RecordingTimers(SilentTimers(), recorder)
        assert timers.log_level == 0
        timers("optimizer", log_level=1).start(barrier=True)
        run(order, clock, recorder, duration_ms)
        now_ms = 0.0
        for span, operation in zip(recorder.times().spans, order, strict=True):
            end_ms = now_ms + duration_ms(*operation)
            assert (span[:3], span.start_ms, span.end_ms) == (operation, now_ms, end_ms)
            now_ms = end_ms + 1000.0


def test_a_stop_without_a_start_leaves_only_its_own_time_unknown() -> None:
    order, clock, recorder = recorder_for(1, 1, 2, 0)
    recorder.bind_forward(0, 0)
    recorder.stop(FORWARD_TIMER)
    run(order[1:], clock, recorder, lambda *_: 5.0)
    times = recorder.times()
    assert [span[:3] for span in times.spans] == order[1:]


def test_the_schedule_lasts_until_its_last_backward() -> None:
    order, clock, recorder = recorder_for(1, 1, 2, 0)
    timers = RecordingTimers(SilentTimers(), recorder)
    clock.now_ms = 250.0
    assert np.isnan(recorder.times().schedule_ms)
    timers("forward-backward", log_level=1).start(barrier=True)
    clock.now_ms += 30.0
    run(order, clock, recorder, lambda *_: 5.0)
    recorder.end_schedule()
    clock.now_ms += 500.0
    timers("forward-backward").stop()
    times = recorder.times()
    assert times.schedule_ms == 30.0 + 4 * (5.0 + 1000.0)
    assert times.spans[0][3:5] == (30.0, 35.0)
    assert times.start_unix_s == UNIX_S + 0.25


def test_a_schedule_that_began_unseen_counts_from_its_first_span() -> None:
    """Hooks go in with the first forward of a run."""
    order, clock, recorder = recorder_for(1, 1, 2, 0)
    clock.now_ms = 500.0
    run(order, clock, recorder, lambda *_: 5.0)
    recorder.end_schedule()
    times = recorder.times()
    assert np.isnan(times.schedule_ms)
    assert times.start_unix_s == UNIX_S + 0.5
    assert times.spans[0][3:5] == (0.0, 5.0)


def test_times_land_on_their_segment() -> None:
    """Backwards of a micro-batch run in reverse order; each step has segments of its own, and ranks
    that it meets have others."""
    clock = WoundClock()
    recorder = MicroBatchRecorder(clock)
    for segments_M, most_M in (((2, 1), (2, 1)), ((3,), (3,)), ((2, 1, 1), (2, 3, 1))):
        recorder.begin_step()
        order = SegmentedSchedule(segments_M, most_M)(2, len(segments_M), 1)
        recorder.backward_order = backward_order(order, 0)
        places = [(0, m, s) for m, segments in enumerate(segments_M) for s in range(segments)]
        for place in places:
            recorder.start(FORWARD_TIMER)
            recorder.bind_forward(*place)
            clock.now_ms += 1.0
            recorder.stop(FORWARD_TIMER)
        for _ in places:
            recorder.start(BACKWARD_TIMER)
            clock.now_ms += 1.0
            recorder.stop(BACKWARD_TIMER)
        spans = recorder.times().spans
        found = [(span.chunk, span.position, span.segment) for span in spans]
        backward = sorted(places, key=lambda place: (place[1], -place[2]))
        assert found == [*places, *backward]


@pytest.mark.parametrize(("wait_ms", "plan_ms"), [(0.0, 0.0), (3.0, 3.0), (9.0, 5.0)])
def test_a_forward_step_is_waiting_and_the_rest(wait_ms: float, plan_ms: float) -> None:
    """A plan that took longer than the step was not waited for all that time."""
    clock = WoundClock()
    time = HostTime(lambda: clock.now_ms / 1e3)
    time.begin_forward_step()
    clock.now_ms += 5.0
    time.end_forward_step(plan_wait_ms=wait_ms)
    clock.now_ms += 50.0
    time.end_forward_step(plan_wait_ms=wait_ms)  # its beginning was not seen
    assert time.ms == pytest.approx(
        {"plan": plan_ms, "hooks": 5.0 - plan_ms, "reduce": 0.0, "log": 0.0}
    )


def test_collectives_belong_to_the_forward_or_backward_that_runs():
    _, clock, recorder = recorder_for(1, 1, 2, 0)

    def collective(number, ms):
        recorder.begin_collective(number)
        clock.now_ms += ms
        recorder.end_collective(number)

    collective(0, 9.0)
    for position in (0, 1):
        recorder.start(FORWARD_TIMER)
        recorder.bind_forward(0, position)
        collective(2, 1.0 + position)
        recorder.stop(FORWARD_TIMER)
        recorder.start(BACKWARD_TIMER)
        # A recomputed forward runs within backward.
        collective(2, 3.0 + position)
        collective(1, 5.0)
        collective(2, 1.0)
        recorder.stop(BACKWARD_TIMER)
    recorder.start(FORWARD_TIMER)
    collective(0, 9.0)
    recorder.stop(FORWARD_TIMER)
    assert recorder.times().collectives is None
    assert recorder.times(collectives=True).collectives == tuple(
        ((0, position, 0, number, which_pass), ms)
        for position in (0, 1)
        for number, which_pass, ms in (
            *((2, 0, 1.0 + position), (2, 1, 3.0 + position), (1, 1, 5.0), (2, 2, 1.0)),
        )
    )
    recorder.begin_step()
    assert recorder.times(collectives=True).collectives == ()


class Dispatcher:
    """One rank's, which exchanges tokens by doubling them, and passes ``alone`` through."""

    def preprocess(self, tokens: Tensor) -> int:
        return len(tokens)

    def token_dispatch(self, tokens: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
        return tokens * 2.0, alone

    def token_combine(self, tokens: Tensor) -> Tensor:
        return tokens * 3.0


class Layer(BaseMoELayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.token_dispatcher = Dispatcher()

    def forward(self, tokens: Tensor) -> Tensor:
        self.token_dispatcher.preprocess(tokens)
        sent, alone = self.token_dispatcher.token_dispatch(tokens, tokens.square())
        return self.token_dispatcher.token_combine(sent.exp() + alone)


class Heard(list[tuple[str, int]]):
    def begin_collective(self, number: int) -> None:
        self.append(("begin", number))

    def end_collective(self, number: int) -> None:
        self.append(("end", number))


def gradient(model: torch.nn.Module) -> Tensor:
    tokens = torch.linspace(-1.0, 1.0, 5, requires_grad=True)
    model(tokens).sum().backward()
    assert tokens.grad is not None
    return tokens.grad


def test_collectives_are_heard_in_order_and_change_nothing() -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.Tanh(), Layer())
    expected = gradient(model)
    heard, later = Heard(), Heard()
    for _ in range(2):
        watch_expert_collectives(model, heard)
    assert torch.equal(gradient(model), expected)
    forward = [*range(2 * COLLECTIVES_PER_LAYER)]
    backward = [number for number in reversed(forward) if number % COLLECTIVES_PER_LAYER]
    assert heard == [(what, x) for x in forward + backward for what in ("begin", "end")]

    with torch.no_grad():
        model(torch.ones(3))
    assert heard[len(forward + backward) * 2 :] == heard[: len(forward) * 2]

    watch_expert_collectives(model, later)
    count = len(heard)
    gradient(model)
    assert len(heard) == count
    assert len(later) == 2 * len(forward + backward)
