# SPDX-License-Identifier: Apache-2.0
"""What a run looks like right now: numbers of its last steps, for the terminal.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from sparsebalance_megatron.report.timeline import Timeline, measured_timeline
from sparsebalance_megatron.telemetry.follow import SeenStep, StepLogFollower
from sparsebalance_megatron.telemetry.rank_record import Place
from sparsebalance_megatron.telemetry.step_log import logged_schedule

RECENT_STEPS = 10
"""What "recently" means of devices and times: single steps are noisy."""
_SILENT_STEPS = 5
"""Typical steps without a line, after which a run is called silent."""
_LEAST_SILENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """The stage that most exceeded its prediction recently, against the median stage.

    ``slowness``: 1.2 takes 20 % longer than the median of all stages, for equal predictions.
    ``host``: empty where no log names it.
    """

    place: Place
    host: str
    slowness: float


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """One look at a run. Times in ms; None where nothing is known yet.

    ``recent_ms``: median of the last steps. ``measured_rank_ms`` and ``predicted_rank_ms``: of the
    busiest rank of the last step. ``silent_s``: seconds since the log grew, where that is longer
    than steps take; the run has ended then, or hangs. ``shared_rows`` lay on several ranks of the
    last step, at most on ``widest``.
    """

    iteration: int
    iteration_ms: float | None
    recent_ms: float | None
    measured_rank_ms: float | None
    predicted_rank_ms: float | None
    coverage: float | None
    coverage_base: float | None
    lm_loss: float | None
    losses: tuple[float, ...]
    tokens: int
    shared_rows: int
    widest: int
    slowest: SlowDevice | None
    timeline: Timeline | None
    silent_s: float | None
    notes: tuple[str, ...]


def live_view(
    follower: StepLogFollower, hosts: Mapping[Place, str], quiet_s: float | None
) -> LiveView | None:
    """What the follower has read so far; None before the first step.

    Args:
        quiet_s: seconds since the log grew; None where that is not known.
    """
    if not follower.steps:
        return None
    steps = follower.steps
    recent = steps[-RECENT_STEPS:]
    last = steps[-1].step
    times = follower.last_times
    known_ms = [each.step.iteration_ms for each in recent if each.step.iteration_ms]
    recent_ms = median(known_ms) if known_ms else None
    return LiveView(
        iteration=last.iteration,
        iteration_ms=last.iteration_ms,
        recent_ms=recent_ms,
        measured_rank_ms=max(last.measured_rank_ms) if last.measured_rank_ms else None,
        predicted_rank_ms=max(last.predicted_rank_ms) if last.predicted_rank_ms else None,
        coverage=last.coverage,
        coverage_base=last.coverage_base,
        lm_loss=last.lm_loss,
        losses=tuple(each.step.lm_loss for each in steps if each.step.lm_loss is not None),
        tokens=last.tokens,
        shared_rows=0 if times is None else times.shared_rows,
        widest=1 if times is None else times.widest,
        slowest=_slowest(recent, hosts),
        timeline=measured_timeline(times, {}, schedule=logged_schedule(follower.header)),
        silent_s=_silence(recent_ms, quiet_s),
        notes=tuple(_notes(follower)),
    )


def _slowest(steps: Sequence[SeenStep], hosts: Mapping[Place, str]) -> SlowDevice | None:
    """By the sums over the last steps of one shape, so that short steps count for little."""
    shape = steps[-1].measured_RP.shape
    measured_RP, predicted_RP = np.zeros(shape), np.zeros(shape)
    for each in steps:
        if each.predicted_RP is None or each.measured_RP.shape != shape:
            continue
        if np.isfinite(each.measured_RP).all():
            measured_RP += each.measured_RP
            predicted_RP += each.predicted_RP
    if measured_RP.size < 2 or not (predicted_RP > 0.0).all():
        return None
    ratio_RP = measured_RP / predicted_RP
    typical = float(np.median(ratio_RP))
    if not typical > 0.0:
        return None
    rank, stage = (int(i) for i in np.unravel_index(ratio_RP.argmax(), shape))
    return SlowDevice(
        place=(rank, stage),
        host=hosts.get((rank, stage), ""),
        slowness=float(ratio_RP[rank, stage]) / typical,
    )


def _silence(recent_ms: float | None, quiet_s: float | None) -> float | None:
    """``quiet_s`` where a run that works would not be quiet for so long."""
    patience_s = max(_LEAST_SILENCE_S, _SILENT_STEPS * (recent_ms or 0.0) / 1e3)
    return quiet_s if quiet_s is not None and quiet_s > patience_s else None


def _notes(follower: StepLogFollower) -> list[str]:
    notes = []
    if follower.unreadable:
        notes.append(f"{follower.unreadable} lines of the log are damaged and left out")
    if follower.skipped_bytes:
        notes.append(f"the first {follower.skipped_bytes / 2**20:.0f} MiB of the log are not read")
    return notes
