# SPDX-License-Identifier: Apache-2.0
"""Where a run is right now, in one line of text.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.log.reader import LogTail
from sparsebalance_megatron.log.records import SIDES, Place, StepRecord
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.text_table import printable, shown_ms

_RECENT_STEPS = 10
"""What is said of devices and times looks at so many: single steps are noisy."""
_SILENT_STEPS = 5
"""Typical steps without a line, after which a run is called silent."""
_MIN_SILENCE_S = 60.0


class SlowDevice(NamedTuple):
    """The stage that exceeds its prediction most; ``slowness`` is relative to the median stage."""

    place: Place
    slowness: float


def status_line(tail: LogTail, hosts: Mapping[Place, str], silent_s: float | None) -> str:
    """The last step, and what the steps before it say.

    Args:
        hosts: of every stage of every rank, as far as the ranks' logs name them.
        silent_s: seconds since the log grew, where that says something.
    """
    step, recent = tail.steps[-1], tail.steps[-_RECENT_STEPS:]
    measured_ms, predicted_ms = (
        max(each) if each else None for each in (step.measured_rank_ms, step.predicted_rank_ms)
    )
    parts = [
        f"iteration {step.iteration}",
        f"{_ms(step.iteration_ms)} ms, recently {_ms(_typical_ms(recent))}",
        f"loss {_number(step.lm_loss, '.4g')}",
        f"coverage {_number(step.coverage.mean, '.3f')}, at base budgets "
        f"{_number(step.coverage.base_mean, '.3f')}",
        f"busiest rank {_ms(measured_ms)} ms, predicted {_ms(predicted_ms)}",
    ]
    if (slowest := slowest_device(recent)) is not None:
        (rank, stage), slowness = slowest
        host = hosts.get(slowest.place)
        where = f" on {printable(host)}" if host else ""
        parts.append(f"slowest rank {rank} stage {stage}{where} {slowness:.2f}x")
    if silent_s is not None:
        parts.append(f"silent for {silent_s / 60:.0f} min: the run has ended, or hangs")
    if tail.damaged:
        parts.append(f"{tail.damaged} damaged lines left out")
    return " | ".join(parts)


def patience_s(steps: Sequence[StepRecord]) -> float:
    """For how long a run that works may log nothing."""
    typical_ms = _typical_ms(steps[-_RECENT_STEPS:]) or 0.0
    return max(_MIN_SILENCE_S, _SILENT_STEPS * typical_ms / 1e3)


def slowest_device(records: Sequence[StepRecord]) -> SlowDevice | None:
    """The device that is slowest over the last steps of one shape; long steps count for more."""
    alike = [each for each in records if each.shape[:2] == records[-1].shape[:2] and each.complete]
    if not alike or len(alike[-1].places) < 2:
        return None
    predicted_RP, measured_RP = (
        np.sum([stage_busy_ms(each.times_2RPVM(side)) for each in alike], axis=0) for side in SIDES
    )
    if not (predicted_RP > 0.0).all():
        return None
    ratio_RP = measured_RP / predicted_RP
    typical = float(np.median(ratio_RP))
    if not typical > 0.0:
        return None
    place = alike[-1].places[int(ratio_RP.argmax())]
    return SlowDevice(place, float(ratio_RP[place]) / typical)


def _typical_ms(steps: Sequence[StepRecord]) -> float | None:
    known_ms = [step.iteration_ms for step in steps if step.iteration_ms]
    return median(known_ms) if known_ms else None


def _ms(value: float | None) -> str:
    return "-" if value is None else shown_ms(value)


def _number(value: float | None, layout: str) -> str:
    return "-" if value is None else format(value, layout)
