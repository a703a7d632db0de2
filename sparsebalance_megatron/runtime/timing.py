# SPDX-License-Identifier: Apache-2.0
"""Times of every micro-batch's forward and backward, taken through Megatron's ``config.timers``.

Megatron's schedules call ``config.timers("forward-compute").start()`` and ``.stop()`` around every
forward and likewise around every backward. A proxy sees all of them without a patch; marks are
CUDA events or host times, so that recording never waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

FORWARD_TIMER = "forward-compute"
BACKWARD_TIMER = "backward-compute"
SCHEDULE_TIMER = "forward-backward"


class Span(NamedTuple):
    """A forward or a backward of one micro-batch on this rank, in ms since its step's start."""

    direction: str
    chunk: int
    position: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What one rank took for one step. Times in ms, NaN where unmeasured.

    ``forward_VM``, ``backward_VM``: per chunk and micro-batch. ``schedule_ms``: from the schedule's
    start to this rank's last backward. ``spans``: what was measured, by start, in ms since
    ``start_unix_s``, the schedule's start; of a step whose schedule began unseen, that is the start
    of the first span. None where nothing was seen.
    """

    forward_VM: np.ndarray
    backward_VM: np.ndarray
    schedule_ms: float
    start_unix_s: float | None
    spans: tuple[Span, ...]


class Clock(Protocol):
    """Takes marks without waiting; resolves differences when the step is over."""

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Waits until the device has come to ``end``."""


class HostClock:
    """Host time; for a model on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class CudaEventClock:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)


class MicroBatchRecorder:
    """Forward and backward marks of one rank's micro-batches within one step.

    Forwards name themselves (:meth:`bind_forward`). Backwards do not, so the k-th backward is the
    k-th backward of the schedule's order.

    Args:
        clock: takes the marks.
        virtual_stages, micro_batches: V and M of the job.
        backward_order: (chunk, micro-batch) of every backward of this pipeline stage, in order.
        unix_clock: seconds since 1970, to set the ranks' steps side by side.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        virtual_stages: int,
        micro_batches: int,
        backward_order: Sequence[tuple[int, int]],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self._shape = (virtual_stages, micro_batches)
        self._backward_order = tuple(backward_order)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._origin: tuple[Any, float] | None = None
        self._open: dict[str, Any] = {}
        self._bound: tuple[int, int] | None = None
        self._backwards = 0
        self._spans: list[tuple[str, int, int, Any, Any]] = []
        self._schedule: tuple[Any, Any] | None = None

    def bind_forward(self, chunk: int, micro_batch: int) -> None:
        """Name the forward that is running."""
        self._bound = (chunk, micro_batch)

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
        begin = self._open.pop(timer_name, None)
        identity = self._identity(timer_name)
        if begin is not None and identity is not None:
            direction = "forward" if timer_name == FORWARD_TIMER else "backward"
            self._spans.append((direction, *identity, begin, self._clock.mark()))

    def _identity(self, timer_name: str) -> tuple[int, int] | None:
        if timer_name == FORWARD_TIMER:
            identity, self._bound = self._bound, None
            return identity
        index, self._backwards = self._backwards, self._backwards + 1
        return self._backward_order[index] if index < len(self._backward_order) else None

    def end_schedule(self) -> None:
        """The last backward of this rank is done; what follows is gradient reduction."""
        begin = self._open.pop(SCHEDULE_TIMER, None)
        self._schedule = None if begin is None else (begin, self._clock.mark())

    def wait(self) -> None:
        """Until the device has come to the end of the last span."""
        if self._spans:
            self._clock.elapsed_ms(*self._spans[-1][-2:])

    def times(self) -> StepTimes:
        """Everything measured since :meth:`begin_step`; after :meth:`wait`."""
        forward_VM, backward_VM = np.full((2, *self._shape), np.nan)
        spans = []
        if self._origin is not None:
            origin, elapsed_ms = self._origin[0], self._clock.elapsed_ms
            for direction, chunk, position, begin, end in self._spans:
                start_ms, ms = elapsed_ms(origin, begin), elapsed_ms(begin, end)
                spans.append(Span(direction, chunk, position, start_ms, start_ms + ms))
                (forward_VM if direction == "forward" else backward_VM)[chunk, position] = ms
        return StepTimes(
            forward_VM=forward_VM,
            backward_VM=backward_VM,
            schedule_ms=math.nan
            if self._schedule is None
            else self._clock.elapsed_ms(*self._schedule),
            start_unix_s=None if self._origin is None else self._origin[1],
            spans=tuple(spans),
        )


class RecordingTimers:
    """Stands in for Megatron's ``Timers`` in ``config.timers`` and hands everything on to it."""

    def __init__(self, inner: Any, recorder: MicroBatchRecorder) -> None:
        self.inner = inner
        self.recorder = recorder

    def __call__(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        timer = self.inner(name, *arguments, **keywords)
        if name in (FORWARD_TIMER, BACKWARD_TIMER, SCHEDULE_TIMER):
            return _RecordingTimer(timer, name, self.recorder)
        return timer

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)


class _RecordingTimer:
    def __init__(self, inner: Any, name: str, recorder: MicroBatchRecorder) -> None:
        self._inner = inner
        self._name = name
        self._recorder = recorder

    def start(self, *arguments: Any, **keywords: Any) -> None:
        self._inner.start(*arguments, **keywords)
        self._recorder.start(self._name)

    def stop(self, *arguments: Any, **keywords: Any) -> None:
        self._recorder.stop(self._name)
        self._inner.stop(*arguments, **keywords)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._inner, attribute)
