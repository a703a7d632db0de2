# SPDX-License-Identifier: Apache-2.0
"""Times of the forwards and backwards of a step on one rank, by Megatron's timers.

Megatron's schedules call ``config.timers("forward-compute").start()`` and ``.stop()`` around every
forward and likewise around every backward. A proxy sees all of them without a patch. Marks are CUDA
events or host times, so that recording never waits for the device.

A layer of experts gathers how many tokens each rank of its group sends, dispatches them, and
combines what the experts made of them. Backward repeats the last two the other way round. Whoever
comes first to one of these collectives waits for the others there, so they are watched, too.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

from sparsebalance_megatron.learn.measurement import PASSES, CollectivePlace, Span, StepTimes

FORWARD_TIMER = "forward-compute"
BACKWARD_TIMER = "backward-compute"
SCHEDULE_TIMER = "forward-backward"

Place = tuple[int, int, int]
"""Chunk, micro-batch and segment."""


class Clock(Protocol):
    """Takes marks without waiting; resolves differences when the step is over."""

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Waits until the device has come to ``end``."""


class HostClock:
    """Host time; for a model on the CPU."""

    mark = staticmethod(time.perf_counter)

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
    """Marks of the forwards and backwards of one rank's micro-batches or segments within one step.

    Forwards name themselves (:meth:`bind_forward`). Backwards do not, so the k-th backward is the
    k-th of ``backward_order``, the step's backwards on this stage in their order, which is set
    before the step's first forward is bound.

    ``unix_clock``: seconds since 1970, to set the ranks' steps side by side.
    """

    def __init__(self, clock: Clock, *, unix_clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self.backward_order: Sequence[Place] = ()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._origin: tuple[Any, float] | None = None
        self._open: dict[str, Any] = {}
        self._bound: Place | None = None
        self._backwards = 0
        self._spans: list[tuple[str, Place, Any, Any]] = []
        self._collectives: list[tuple[CollectivePlace, Any, Any]] = []
        self._backward_passes: Counter[tuple[Place, int]] = Counter()
        self._open_collectives: dict[int, Any] = {}
        self._schedule: tuple[Any, Any] | None = None

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
        return self.backward_order[index] if index < len(self.backward_order) else None

    def begin_collective(self, number: int) -> None:
        """A collective of the running chunk begins, in which ranks may wait for one another."""
        self._open_collectives[number] = self._clock.mark()

    def end_collective(self, number: int) -> None:
        """It ends. One outside forwards and backwards of the step, as in evaluation, is
        forgotten."""
        begin = self._open_collectives.pop(number, None)
        for timer_name in (FORWARD_TIMER, BACKWARD_TIMER):
            place = self._running(timer_name) if timer_name in self._open else None
            if begin is not None and place is not None:
                which, which_pass, end = (place, number), 0, self._clock.mark()
                if timer_name == BACKWARD_TIMER:
                    self._backward_passes[which] += 1
                    which_pass = min(self._backward_passes[which], PASSES - 1)
                self._collectives.append(((*place, number, which_pass), begin, end))

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
        """The times since :meth:`begin_step`, once :meth:`wait` has returned; ``collectives``:
        whether all those in which ranks wait for one another were recorded."""
        elapsed_ms = self._clock.elapsed_ms
        origin, start_unix_s = self._origin or (None, None)
        spans = []
        for direction, (chunk, position, segment), begin, end in self._spans:
            start_ms, ms = elapsed_ms(origin, begin), elapsed_ms(begin, end)
            spans.append(Span(direction, chunk, position, start_ms, start_ms + ms, segment))
        inside = ((place, elapsed_ms(begin, end)) for place, begin, end in self._collectives)
        return StepTimes(
            schedule_ms=elapsed_ms(*self._schedule) if self._schedule else math.nan,
            start_unix_s=start_unix_s,
            spans=tuple(spans),
            collectives=tuple(inside) if collectives else None,
        )


class NoTimers:
    """Timers that do nothing, for a config that has none."""

    def __call__(self, name: str, log_level: int | None = None) -> "NoTimers":
        return self

    def start(self, barrier: bool = False) -> None:
        return None

    stop = start


@dataclass(eq=False)
class RecordingTimers:
    """Stands in for Megatron's ``Timers`` in ``config.timers`` and hands everything on to it."""

    inner: Any
    recorder: MicroBatchRecorder

    def __call__(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        timer = self.inner(name, *arguments, **keywords)
        if name in (FORWARD_TIMER, BACKWARD_TIMER, SCHEDULE_TIMER):
            return _RecordingTimer(timer, name, self.recorder)
        return timer

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)


@dataclass(eq=False)
class _RecordingTimer:
    inner: Any
    name: str
    recorder: MicroBatchRecorder

    def start(self, *arguments: Any, **keywords: Any) -> None:
        self.inner.start(*arguments, **keywords)
        self.recorder.start(self.name)

    def stop(self, *arguments: Any, **keywords: Any) -> None:
        self.recorder.stop(self.name)
        self.inner.stop(*arguments, **keywords)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)


_COLLECTIVES = ("preprocess", "token_dispatch", "token_combine")
"""Methods of token dispatchers that hold collectives. Not every dispatcher has the first."""
COLLECTIVES_PER_LAYER = len(_COLLECTIVES)
_WATCHED = "_sparse_balance_watched"


def watch_expert_collectives(model: Any, recorder: MicroBatchRecorder) -> None:
    """Have a recorder hear of the collectives of a model chunk's expert layers; idempotent.

    The i-th expert layer's collectives have the numbers from i x :data:`COLLECTIVES_PER_LAYER`.
    Backward is heard through hooks of the autograd graph.
    """
    if getattr(model, _WATCHED, None) is recorder:
        return
    layers = [module for module in model.modules() if isinstance(module, BaseMoELayer)]
    for layer, module in enumerate(layers):
        dispatcher = module.token_dispatcher
        for index, name in enumerate(_COLLECTIVES):
            # An earlier run's watch is an attribute of the object and hides the method.
            vars(dispatcher).pop(name, None)
            if (method := getattr(dispatcher, name, None)) is not None:
                number = layer * COLLECTIVES_PER_LAYER + index
                setattr(dispatcher, name, _watched(method, recorder, number))
    setattr(model, _WATCHED, recorder)


def _watched(
    method: Callable[..., Any], recorder: MicroBatchRecorder, number: int
) -> Callable[..., Any]:
    """The method, whose forward and backward the recorder hears of."""

    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        recorder.begin_collective(number)
        result = method(*arguments, **keywords)
        recorder.end_collective(number)
        # A tensor that passes through as it is, in a group of one rank, was exchanged with nobody.
        for node in _nodes(result) - _nodes(arguments):
            node.register_prehook(lambda gradients: recorder.begin_collective(number))
            node.register_hook(lambda inputs, outputs: recorder.end_collective(number))
        return result

    return call


def _nodes(values: Any) -> set[Any]:
    """Nodes of the autograd graph that made the tensors of a tuple or a single tensor."""
    tensors = values if isinstance(values, tuple) else (values,)
    return {value.grad_fn for value in tensors if isinstance(value, Tensor)} - {None}
