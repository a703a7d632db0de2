# SPDX-License-Identifier: Apache-2.0
"""Puts the hooks that watch a training step into a Megatron model's config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebalance_megatron.megatron.timers import (
    FORWARD_TIMER,
    RecordingTimers,
    ReportingFinalize,
)
from sparsebalance_megatron.training.timing import MicroBatchRecorder


def install_hooks(
    model_config: Any, recorder: MicroBatchRecorder, after_finalize: Callable[[], None]
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
