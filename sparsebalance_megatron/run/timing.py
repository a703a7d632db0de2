# SPDX-License-Identifier: Apache-2.0
"""Times of a step on one rank: of forwards and backwards, by Megatron's timers, and of the plugin.

Marks are CUDA events or host times, so that recording never waits for the device.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparsebalance_megatron.learn.measurement import CollectiveTime, Span, StepTimes
from sparsebalance_megatron.megatron.hooks import BACKWARD_TIMER, FORWARD_TIMER, SCHEDULE_TIMER
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule
from sparsebalance_megatron.profile.cells import Clock

Place = tuple[int, int, int]
"""Chunk, micro-batch and segment."""


class MicroBatchRecorder:
    """Marks of the forwards and backwards of one rank's micro-batches or segments within one step.

    Forwards name themselves (:meth:`bind_forward`). Backwards do not, so the k-th backward is the
    k-th backward of the schedule's order.

    Args:
        clock: takes the marks.
        backward_order: of a step whose segments run in a schedule, (chunk, micro-batch, segment)
            of every backward of this pipeline stage, in order.
        unix_clock: seconds since 1970, to set the ranks' steps side by side.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        backward_order: Callable[[SegmentedSchedule], Sequence[Place]],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self._order_of = backward_order
        self._expected: SegmentedSchedule | None = None
        self._backward_order: tuple[Place, ...] = ()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._origin: tuple[Any, float] | None = None
        self._open: dict[str, Any] = {}
        self._bound: Place | None = None
        self._backwards = 0
        self._spans: list[tuple[str, Place, Any, Any]] = []
        self._collectives: list[tuple[str, Place, int, int, Any, Any]] = []
        self._passes: Counter[tuple[str, Place, int]] = Counter()
        self._open_collectives: dict[int, Any] = {}
        self._schedule: tuple[Any, Any] | None = None

    def expect(self, schedule: SegmentedSchedule) -> None:
        """Say what segments the step's micro-batches have, before its first forward is bound."""
        if schedule != self._expected:
            self._expected = schedule
            self._backward_order = tuple(self._order_of(schedule))

    def bind_forward(self, chunk: int, micro_batch: int, segment: int = 0) -> None:
        """Name the forward that is running."""
        self._bound = (chunk, micro_batch, segment)

    def start(self, timer_name: str) -> None:
        mark = self._open[timer_name] = self._clock.mark()
        # A schedule without a backward, evaluation, may have run before.
        if self._origin is None or (timer_name == SCHEDULE_TIMER and not self._spans):
            self._origin = (mark, self._unix_clock())

    def stop(self, timer_name: str) -> None:
        """End a span. A stop without a start (timers installed in between) leaves it unmeasured."""
        if timer_name == SCHEDULE_TIMER:
            # Nothing has finalised gradients: the schedule ends here.
            if self._schedule is None and self._backwards:
                self.end_schedule()
            return
        begin, place = self._open.pop(timer_name, None), self._running(timer_name)
        if timer_name == FORWARD_TIMER:
            direction, self._bound = "forward", None
        else:
            direction, self._backwards = "backward", self._backwards + 1
        if begin is not None and place is not None:
            self._spans.append((direction, place, begin, self._clock.mark()))

    def _running(self, timer_name: str) -> Place | None:
        """The place of the operation that runs; None where it is none of the step's."""
        if timer_name == FORWARD_TIMER:
            return self._bound
        index = self._backwards
        return self._backward_order[index] if index < len(self._backward_order) else None

    def begin_collective(self, number: int) -> None:
        """A collective of the running chunk begins, in which ranks may wait for one another."""
        self._open_collectives[number] = self._clock.mark()

    def end_collective(self, number: int) -> None:
        """It ends. One outside forwards and backwards of the step, as in evaluation, is
        forgotten."""
        begin = self._open_collectives.pop(number, None)
        for direction, timer_name in (("forward", FORWARD_TIMER), ("backward", BACKWARD_TIMER)):
            place = self._running(timer_name) if timer_name in self._open else None
            if begin is not None and place is not None:
                which, end = (direction, place, number), self._clock.mark()
                self._collectives.append((*which, self._passes[which], begin, end))
                self._passes[which] += 1

    def end_schedule(self) -> None:
        """The last backward of this rank is done; what follows is gradient reduction."""
        begin = self._open.pop(SCHEDULE_TIMER, None)
        self._schedule = None if begin is None else (begin, self._clock.mark())

    def wait(self) -> bool:
        """Wait until the device has come to the end of the last span; whether there is one."""
        if self._spans:
            self._clock.elapsed_ms(*self._spans[-1][-2:])
        return bool(self._spans)

    def times(self, *, collectives: bool = False) -> StepTimes:
        """The times measured since :meth:`begin_step`; call it after :meth:`wait`.

        Args:
            collectives: whether all those in which ranks wait for one another were recorded.
        """
        elapsed_ms = self._clock.elapsed_ms
        origin, start_unix_s = self._origin or (None, None)
        spans = []
        for direction, (chunk, position, segment), begin, end in self._spans:
            start_ms, ms = elapsed_ms(origin, begin), elapsed_ms(begin, end)
            spans.append(Span(direction, chunk, position, start_ms, start_ms + ms, segment))
        inside = []
        for direction, (chunk, position, segment), number, before, begin, end in self._collectives:
            ms = elapsed_ms(begin, end)
            inside.append(CollectiveTime(direction, chunk, position, number, ms, segment, before))
        return StepTimes(
            schedule_ms=elapsed_ms(*self._schedule) if self._schedule else math.nan,
            start_unix_s=start_unix_s,
            spans=tuple(spans),
            collectives=tuple(inside) if collectives else None,
        )


PARTS = ("plan", "hooks", "reduce", "log")


class HostTime:
    """ms of the current step that this rank spent in the plugin, where training waited for it.

    - ``plan``: waiting for the step's plan.
    - ``hooks``: everything else between the start of a forward step and the model, and around the
      loss: reading, packing, layout, bookkeeping.
    - ``reduce``: gathering measurements at the step's end and learning from them, without the time
      that the device or other ranks take to get there.
    - ``log``: what Megatron's log line gets, and handing over to the logs, that of the step before
      included.

    ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._ms = dict.fromkeys(PARTS, 0.0)
        self._forward_step_began_s: float | None = None

    def add_ms(self, part: str, ms: float) -> None:
        """Count so much for a part."""
        self._ms[part] += ms

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Count what passes within, for a part."""
        began_s = self.clock()
        yield
        self.add_ms(part, (self.clock() - began_s) * 1e3)

    def begin_forward_step(self) -> None:
        """Begin to count for the plugin, until :meth:`end_forward_step`."""
        self._forward_step_began_s = self.clock()

    def end_forward_step(self, *, plan_wait_ms: float) -> None:
        """Count the time since the forward step began; nothing where that was not seen.

        Args:
            plan_wait_ms: how much of it was spent waiting for the plan.
        """
        began_s, self._forward_step_began_s = self._forward_step_began_s, None
        if began_s is None:
            return
        passed_ms = (self.clock() - began_s) * 1e3
        plan_ms = min(plan_wait_ms, passed_ms)
        self.add_ms("plan", plan_ms)
        self.add_ms("hooks", passed_ms - plan_ms)

    def take_ms(self) -> dict[str, float]:
        """Sums by part since the last call."""
        taken, self._ms = self._ms, dict.fromkeys(PARTS, 0.0)
        return taken
