# SPDX-License-Identifier: Apache-2.0
"""Host time by part, on a clock that is set by hand."""

from __future__ import annotations

import pytest

from sparsebalance_megatron.run.timing import HostTime


class HandClock:
    """Seconds; ``passes`` takes ms."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, ms: float) -> None:
        self.now_s += ms / 1e3


@pytest.mark.parametrize(("wait_ms", "plan_ms"), [(0.0, 0.0), (3.0, 3.0), (9.0, 5.0)])
def test_a_forward_step_is_waiting_and_the_rest(wait_ms: float, plan_ms: float) -> None:
    """A plan that took longer than the step was not waited for all that time."""
    clock = HandClock()
    time = HostTime(clock)
    time.begin_forward_step()
    clock.passes(5.0)
    time.end_forward_step(plan_wait_ms=wait_ms)
    clock.passes(50.0)
    time.end_forward_step(plan_wait_ms=wait_ms)  # its beginning was not seen
    assert time.take_ms() == pytest.approx(
        {"plan": plan_ms, "hooks": 5.0 - plan_ms, "reduce": 0.0, "log": 0.0}
    )


def test_parts_add_up_and_are_taken_once() -> None:
    clock = HandClock()
    time = HostTime(clock)
    for _ in range(2):
        with time.counted("reduce"):
            clock.passes(4.0)
            time.add_ms("reduce", -1.0)
    assert time.take_ms()["reduce"] == pytest.approx(6.0)
    assert not any(time.take_ms().values())
