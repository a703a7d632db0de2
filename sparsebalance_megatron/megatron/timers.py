# SPDX-License-Identifier: Apache-2.0
"""Stand-ins in Megatron's config through which a step is watched: timers, and the finalisation of
gradients.

Megatron's schedules call ``config.timers("forward-compute").start()`` and ``.stop()`` around every
forward and likewise around every backward. A proxy sees all of them without a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

FORWARD_TIMER = "forward-compute"
BACKWARD_TIMER = "backward-compute"
SCHEDULE_TIMER = "forward-backward"


class Recorder(Protocol):
    """What hears of the names above, and that gradients are about to be finalised."""

    def start(self, timer_name: str) -> None: ...

    def stop(self, timer_name: str) -> None: ...

    def end_schedule(self) -> None: ...


class RecordingTimers:
    """Stands in for Megatron's ``Timers`` in ``config.timers`` and hands everything on to it."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
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
    def __init__(self, inner: Any, name: str, recorder: Recorder) -> None:
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


@dataclass(frozen=True)
class ReportingFinalize:
    """Wraps ``finalize_model_grads_func``: the one place every rank passes once per step."""

    before: Callable[[], None]
    finalize: Callable[..., Any]
    after: Callable[[], object]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.before()
        result = self.finalize(*arguments, **keywords)
        self.after()
        return result


def install_hooks(
    model_config: Any, recorder: Recorder, after_finalize: Callable[[], object]
) -> None:
    """Watch ``timers`` and ``finalize_model_grads_func``, unless they are watched already.

    It is called in every forward step, because Megatron's loop resets both attributes.

    Args:
        recorder: of this rank, told when forwards, backwards and the schedule begin and end.
        after_finalize: called when gradients are final.
    """
    timers = model_config.timers
    if timers is not None and not isinstance(timers, RecordingTimers):
        model_config.timers = RecordingTimers(timers, recorder)
        # The forward that brought us here began before its timer could be watched.
        recorder.start(FORWARD_TIMER)
    finalize = model_config.finalize_model_grads_func
    if finalize is not None and not isinstance(finalize, ReportingFinalize):
        model_config.finalize_model_grads_func = ReportingFinalize(
            recorder.end_schedule, finalize, after_finalize
        )
