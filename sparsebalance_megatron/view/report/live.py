# SPDX-License-Identifier: Apache-2.0
"""What a run looks like right now, as lines of text: a strip of its last step, and its figures.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.follow import StepLogFollower
from sparsebalance_megatron.log.records import SIDES, Place, StepRecord
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.plan.pipeline.orders import megatron_order
from sparsebalance_megatron.text_table import printable, wrapped
from sparsebalance_megatron.view.report.timeline import Timeline, simulated_timeline

RECENT_STEPS = 10
"""What "recently" means of devices and times: single steps are noisy."""
FORWARD, BACKWARD, WAITING = "▆", "█", "·"
MOST_STRIPS = 8
_SILENT_STEPS = 5
"""Typical steps without a line, after which a run is called silent."""
_MIN_SILENCE_S = 60.0
_LEVELS = "▁▂▃▄▅▆▇█"
_NOTEWORTHY_SLOWNESS = 1.05
_LABEL_CHARACTERS = 10


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """The stage that most exceeded its prediction recently, against the median stage.

    ``slowness``: 1.2 takes 20 % longer than the median of all stages, for equal predictions.
    ``host``: empty where no log names it.
    """

    place: Place
    host: str
    slowness: float

    def __str__(self) -> str:
        rank, stage = self.place
        return f"rank {rank} stage {stage}" + (f" on {printable(self.host)}" if self.host else "")


@dataclass(frozen=True, kw_only=True)
class LiveView:
    """One look at a run: its last step, and what the steps before it say.

    ``recent_ms``: median of the last steps, None where none was measured. ``silent_s``: seconds
    since the log grew, where that is longer than steps take; the run has ended then, or hangs.
    ``unreadable``: damaged lines that were left out.
    """

    step: StepRecord
    recent_ms: float | None
    losses: tuple[float, ...]
    slowest: SlowDevice | None
    timeline: Timeline | None
    silent_s: float | None
    unreadable: int


def live_view(follower: StepLogFollower, hosts: Mapping[Place, str]) -> LiveView | None:
    """What the follower has read so far; None before the first step."""
    if not follower.steps:
        return None
    recent = follower.steps[-RECENT_STEPS:]
    known_ms = [record.iteration_ms for record in recent if record.iteration_ms]
    recent_ms = median(known_ms) if known_ms else None
    schedule = follower.header.pipeline_schedule if follower.header else megatron_order
    return LiveView(
        step=recent[-1],
        recent_ms=recent_ms,
        losses=tuple(record.lm_loss for record in follower.steps if record.lm_loss is not None),
        slowest=_slowest(recent, hosts),
        timeline=simulated_timeline(recent[-1], "measured", schedule),
        silent_s=_silence(recent_ms, follower.quiet_s),
        unreadable=follower.unreadable,
    )


def _slowest(records: Sequence[StepRecord], hosts: Mapping[Place, str]) -> SlowDevice | None:
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
    return SlowDevice(
        place=place, host=hosts.get(place, ""), slowness=float(ratio_RP[place]) / typical
    )


def _silence(recent_ms: float | None, quiet_s: float | None) -> float | None:
    """``quiet_s`` where a run that works would not be quiet for so long."""
    patience_s = max(_MIN_SILENCE_S, _SILENT_STEPS * (recent_ms or 0.0) / 1e3)
    return quiet_s if quiet_s is not None and quiet_s > patience_s else None


def view_lines(view: LiveView, width: int) -> list[str]:
    """Everything about the last step, in lines of at most ``width`` characters where words allow.

    Args:
        width: of the terminal, in characters.
    """
    lines = [status_line(view)]
    if view.timeline is not None:
        lines += ["", *timeline_strip(view.timeline, width)]
    lines += ["", *_figures(view, width)]
    if view.unreadable:
        lines.append(f"note: {view.unreadable} lines of the log are damaged and left out")
    return [part for line in lines for part in wrapped(line, width) or [""]]


def status_line(view: LiveView) -> str:
    """Where the run is, in one line; one per step is what ``--plain`` prints."""
    step = view.step
    parts = [
        f"iteration {step.iteration}",
        f"{_ms(step.iteration_ms)} ms",
        f"loss {_number(step.lm_loss, '.4g')}",
        f"coverage {_number(step.coverage.mean, '.3f')}",
        f"busiest rank {_ms(_largest(step.measured_rank_ms))} ms, "
        f"predicted {_ms(_largest(step.predicted_rank_ms))}",
    ]
    if view.slowest is not None:
        parts.append(f"slowest {view.slowest} {view.slowest.slowness:.2f}x")
    if view.silent_s is not None:
        parts.append(f"silent for {_duration(view.silent_s)}: the run has ended, or hangs")
    return " | ".join(parts)


def _figures(view: LiveView, width: int) -> list[str]:
    step, slowest = view.step, view.slowest
    measured_ms, predicted_ms = _largest(step.measured_rank_ms), _largest(step.predicted_rank_ms)
    ratio = f" ({measured_ms / predicted_ms:.2f} of it)" if measured_ms and predicted_ms else ""
    lines = [
        f"step        {_ms(step.iteration_ms)} ms (median of the last steps "
        f"{_ms(view.recent_ms)} ms), {step.tokens:,} tokens",
        f"busiest     measured {_ms(measured_ms)} ms, predicted {_ms(predicted_ms)} ms{ratio}",
        f"coverage    {_number(step.coverage.mean, '.4f')}, at base budgets "
        f"{_number(step.coverage.base_mean, '.4f')}",
        f"loss        {_number(step.lm_loss, '.5g')}  {sparkline(view.losses, width - 24)}",
    ]
    shared_sizes = step.cp_sizes_RM[step.cp_sizes_RM > 1]
    if shared_sizes.size:
        shared = round(float((1.0 / shared_sizes).sum()))
        rows = "one row" if shared == 1 else f"{shared} rows"
        lines.append(f"shared      {rows} on up to {shared_sizes.max()} ranks each")
    if slowest is not None:
        says = (
            f"{slowest.slowness:.2f}x the median device's time for the same prediction"
            if slowest.slowness >= _NOTEWORTHY_SLOWNESS
            else f"{slowest.slowness:.2f}x: no device stands out"
        )
        lines.append(f"slowest     {slowest}: {says}")
    return lines


def timeline_strip(timeline: Timeline, width: int) -> list[str]:
    """The last step over time, a strip per stage; of many stages the busiest ones."""
    columns = max(10, width - _LABEL_CHARACTERS - 2)
    spans = timeline.spans
    busiest = sorted(spans, key=lambda place: -sum(span.ms for span in spans[place]))
    shown = sorted(busiest[:MOST_STRIPS])
    column_ms = timeline.makespan_ms / columns
    lines = [
        f"r{rank} s{stage}".ljust(_LABEL_CHARACTERS)
        + "".join(
            _character(spans[rank, stage], column * column_ms, column_ms)
            for column in range(columns)
        )
        for rank, stage in shown
    ]
    left_out = len(spans) - len(shown)
    also = f"; the {len(shown)} busiest of {len(spans)} stages" if left_out else ""
    indent = " " * _LABEL_CHARACTERS
    lines.append(
        f"{indent}{FORWARD} forward {BACKWARD} backward {WAITING} waiting, "
        f"{timeline.makespan_ms:,.0f} ms{also}"
    )
    lines.append(f"{indent}(times measured, starts simulated)")
    return lines


def _character(spans: Sequence[Span], begin_ms: float, length_ms: float) -> str:
    """What fills most of a part of the step."""
    busy_ms = {FORWARD: 0.0, BACKWARD: 0.0}
    for span in spans:
        kind = FORWARD if span.direction == "forward" else BACKWARD
        inside_ms = min(begin_ms + length_ms, span.end_ms) - max(begin_ms, span.start_ms)
        busy_ms[kind] += max(0.0, inside_ms)
    if sum(busy_ms.values()) > 0.5 * length_ms:
        return max(busy_ms, key=busy_ms.__getitem__)
    return WAITING


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as a row of bars between the least and the largest of them."""
    shown = values[-max(1, width) :]
    if len(shown) < 2:
        return ""
    least, span = min(shown), max(shown) - min(shown)
    if not span > 0.0:
        return _LEVELS[0] * len(shown)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (value - least) / span)] for value in shown)


def _largest(values: tuple[float, ...] | None) -> float | None:
    return max(values) if values else None


def _ms(value: float | None) -> str:
    return _number(value, ",.0f" if value is not None and value >= 100 else ".3g")


def _number(value: float | None, layout: str) -> str:
    return "-" if value is None else format(value, layout)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
