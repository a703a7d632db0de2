# SPDX-License-Identifier: Apache-2.0
"""A run in progress as lines of text: a strip of its last step, numbers, and what stands out."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebalance_megatron.report.live import LiveView
from sparsebalance_megatron.report.timeline import SIMULATED, Bar, Timeline
from sparsebalance_megatron.telemetry.rank_record import Place

FORWARD, BACKWARD, WAITING = "▆", "█", "·"
MOST_ROWS = 8
_LEVELS = "▁▂▃▄▅▆▇█"
_NOTEWORTHY_SLOWNESS = 1.05
_LABEL = 10


def view_lines(view: LiveView, width: int) -> list[str]:
    """Everything about the last step, in lines of at most ``width`` characters where that can be.

    Args:
        width: of the terminal, in characters.
    """
    lines = [status_line(view)]
    if view.timeline is not None and view.timeline.bars:
        lines += ["", *timeline_strip(view.timeline, width)]
    lines += ["", *numbers(view, width)]
    lines += [f"note: {note}" for note in view.notes]
    return lines


def status_line(view: LiveView) -> str:
    """Where the run is, in one line; one per step is what ``--plain`` prints."""
    parts = [
        f"iteration {view.iteration}",
        f"{_ms(view.iteration_ms)} ms",
        f"loss {_number(view.lm_loss, '.4g')}",
        f"coverage {_number(view.coverage, '.3f')}",
        f"busiest rank {_ms(view.measured_rank_ms)} ms, predicted {_ms(view.predicted_rank_ms)}",
    ]
    if view.slowest is not None:
        parts.append(f"slowest {_device(view)} {view.slowest.slowness:.2f}x")
    if view.silent_s is not None:
        parts.append(f"silent for {_duration(view.silent_s)}: the run has ended, or hangs")
    return " | ".join(parts)


def numbers(view: LiveView, width: int) -> list[str]:
    """The numbers of the last step, one line each."""
    lines = [
        f"step        {_ms(view.iteration_ms)} ms (median of the last steps "
        f"{_ms(view.recent_ms)} ms), {view.tokens:,} tokens",
        f"busiest     measured {_ms(view.measured_rank_ms)} ms, predicted "
        f"{_ms(view.predicted_rank_ms)} ms{_ratio(view)}",
        f"coverage    {_number(view.coverage, '.4f')}, at base budgets "
        f"{_number(view.coverage_base, '.4f')}",
        f"loss        {_number(view.lm_loss, '.5g')}  {sparkline(view.losses, width - 24)}",
    ]
    if view.shared_rows:
        rows = "one row" if view.shared_rows == 1 else f"{view.shared_rows} rows"
        lines.append(f"shared      {rows} on up to {view.widest} ranks each")
    if view.slowest is not None:
        says = (
            f"{view.slowest.slowness:.2f}x the median device's time for the same prediction"
            if view.slowest.slowness >= _NOTEWORTHY_SLOWNESS
            else f"{view.slowest.slowness:.2f}x: no device stands out"
        )
        lines.append(f"slowest     {_device(view)}: {says}")
    return lines


def timeline_strip(timeline: Timeline, width: int) -> list[str]:
    """The last step over time, a row per stage; of many stages the busiest ones."""
    columns = max(10, width - _LABEL - 2)
    per_place: dict[Place, list[Bar]] = {}
    for bar in timeline.bars:
        per_place.setdefault(bar.place, []).append(bar)
    busiest = sorted(per_place, key=lambda place: -sum(bar.ms for bar in per_place[place]))
    shown = sorted(busiest[:MOST_ROWS])
    lines = [
        f"{f'r{rank} s{stage}':<{_LABEL}}{_strip(per_place[rank, stage], timeline, columns)}"
        for rank, stage in shown
    ]
    left_out = len(per_place) - len(shown)
    also = f"; the {len(shown)} busiest of {len(per_place)} stages" if left_out else ""
    known = "times measured, starts simulated" if timeline.source == SIMULATED else timeline.source
    lines.append(
        f"{'':<{_LABEL}}{FORWARD} forward {BACKWARD} backward {WAITING} waiting, "
        f"{timeline.makespan_ms:,.0f} ms{also}"
    )
    lines.append(f"{'':<{_LABEL}}({known})")
    return lines


def _strip(bars: Sequence[Bar], timeline: Timeline, columns: int) -> str:
    """Every character stands for what fills most of its share of the step."""
    makespan_ms = timeline.makespan_ms
    if not makespan_ms > 0.0:
        return WAITING * columns
    per_column_ms = makespan_ms / columns
    filled = [dict.fromkeys((FORWARD, BACKWARD), 0.0) for _ in range(columns)]
    for bar in bars:
        kind = FORWARD if bar.direction == "forward" else BACKWARD
        first = min(columns - 1, int(bar.start_ms / per_column_ms))
        last = min(columns - 1, int(bar.end_ms / per_column_ms))
        for column in range(first, last + 1):
            begin, end = column * per_column_ms, (column + 1) * per_column_ms
            filled[column][kind] += max(0.0, min(end, bar.end_ms) - max(begin, bar.start_ms))
    characters = []
    for each in filled:
        kind = max(each, key=lambda name: each[name])
        busy_ms = sum(each.values())
        characters.append(kind if busy_ms > 0.5 * per_column_ms else WAITING)
    return "".join(characters)


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


def _device(view: LiveView) -> str:
    assert view.slowest is not None
    rank, stage = view.slowest.place
    host = f" on {view.slowest.host}" if view.slowest.host else ""
    return f"rank {rank} stage {stage}{host}"


def _ratio(view: LiveView) -> str:
    measured, predicted = view.measured_rank_ms, view.predicted_rank_ms
    if measured is None or not predicted:
        return ""
    return f" ({measured / predicted:.2f} of it)"


def _ms(value: float | None) -> str:
    return _number(value, ",.0f" if value is not None and value >= 100 else ".3g")


def _number(value: float | None, layout: str) -> str:
    return "-" if value is None else format(value, layout)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"
