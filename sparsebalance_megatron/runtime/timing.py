# SPDX-License-Identifier: Apache-2.0
"""Times of every micro-batch's forward and backward, taken through Megatron's ``config.timers``.

Megatron's schedules call ``config.timers("forward-compute").start()`` and ``.stop()`` around every
forward and likewise around every backward. A proxy sees all of them without a patch; marks are
CUDA events or host times, so that recording never waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

FORWARD_TIMER = "forward-compute"
BACKWARD_TIMER = "backward-compute"
SCHEDULE_TIMER = "forward-backward"


class Clock(Protocol):
    """Takes marks without waiting; resolves differences when the step is over."""

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...


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
    """

    def __init__(
        self,
        clock: Clock,
        *,
        virtual_stages: int,
        micro_batches: int,
        backward_order: Sequence[tuple[int, int]],
    ) -> None:
        self._clock = clock
        self._shape = (virtual_stages, micro_batches)
        self._backward_order = tuple(backward_order)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._open: dict[str, Any] = {}
        self._bound: tuple[int, int] | None = None
        self._backwards = 0
        self._spans: dict[tuple[str, int, int], tuple[Any, Any]] = {}
        self._schedule: tuple[Any, Any] | None = None

    def bind_forward(self, chunk: int, micro_batch: int) -> None:
        """Name the forward that is running."""
        self._bound = (chunk, micro_batch)

    def start(self, timer_name: str) -> None:
        self._open[timer_name] = self._clock.mark()

    def stop(self, timer_name: str) -> None:
        """End a span. A stop without a start (timers installed in between) leaves it unmeasured."""
        if timer_name == SCHEDULE_TIMER:
            return
        begin = self._open.pop(timer_name, None)
        identity = self._identity(timer_name)
        if begin is not None and identity is not None:
            self._spans[(timer_name, *identity)] = (begin, self._clock.mark())

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

    def schedule_ms(self) -> float:
        """From the schedule's start to this rank's last backward; NaN where unmeasured."""
        return math.nan if self._schedule is None else self._clock.elapsed_ms(*self._schedule)

    def elapsed_ms(self) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) ms, each [V, M]; NaN where unmeasured."""
        forward_VM = np.full(self._shape, np.nan)
        backward_VM = np.full(self._shape, np.nan)
        for (timer_name, chunk, micro_batch), (begin, end) in self._spans.items():
            target_VM = forward_VM if timer_name == FORWARD_TIMER else backward_VM
            target_VM[chunk, micro_batch] = self._clock.elapsed_ms(begin, end)
        return forward_VM, backward_VM


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
