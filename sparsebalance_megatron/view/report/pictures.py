# SPDX-License-Identifier: Apache-2.0
"""Bars on a time axis, which ``templates/`` draw as SVG: where a step's time goes.

One step in full, and the mean step against the baseline's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.records import Place
from sparsebalance_megatron.text_table import shown_ms
from sparsebalance_megatron.view.report.numbers import Explanation, TimeSplit
from sparsebalance_megatron.view.report.timeline import Timeline

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#15171a"),
    "ink": ("#1b1d20", "#e8eaed"),
    "muted": ("#626770", "#9aa0a8"),
    "faint": ("#e3e6ea", "#2e3238"),
    "computing": ("#1f6fb2", "#3f8fd0"),
    "forward": ("#8fbde2", "#9ccbf0"),
    "waiting": ("#f0a13c", "#d98a2b"),
    "rest": ("#b3b8bf", "#6d737b"),
    "noise": ("#9a6bb5", "#b48bd0"),
}
"""Name to (light, dark). A kind of time has one colour in all pictures."""

KINDS = {
    "waiting": "waiting",
    "forward": "forward",
    "computing": "computing",
    "rest": "optimizer, gradients",
    "noise": "noise",
}
"""Kinds of time by their names in a legend."""

_MOST_TITLED_BARS = 1000
PLOT_WIDTH = 260.0
"""In the units of the picture, of which a letter is about 6 wide."""
_MOST_TICKS = 6
_LETTER = 6.1
_LABEL_ROOM = 4.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A coloured stretch of a bar.

    ``text`` stands in it where it fits, ``title`` shows when it is pointed at.
    """

    kind: str
    start_ms: float
    ms: float
    text: str = ""
    title: str = ""
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar. ``note`` stands at its right end."""

    label: str
    pieces: tuple[Piece, ...]
    note: str = ""

    @property
    def end_ms(self) -> float:
        return max((piece.start_ms + piece.ms for piece in self.pieces), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars below a heading on one time axis, which ends at ``end_ms``."""

    heading: str
    rows: tuple[Row, ...]
    end_ms: float

    @property
    def ticks_ms(self) -> list[float]:
        """Round values from 0 to at most ``end_ms``."""
        least = self.end_ms / _MOST_TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        return [step * number for number in range(int(self.end_ms / step * (1 + 1e-9)) + 1)]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels one above the other.

    ``alt``: what the picture says, in words. ``remarks``: what is known about it and not drawn.
    ``plot_width``: of the time axis.
    """

    alt: str
    panels: tuple[Panel, ...]
    remarks: tuple[str, ...] = ()
    plot_width: float = PLOT_WIDTH
    row_height: float = 20.0

    @property
    def legend(self) -> dict[str, str]:
        """The kinds of time that are drawn, by their names."""
        drawn = {piece.kind for panel in self.panels for row in panel.rows for piece in row.pieces}
        names = KINDS | ({"computing": "backward"} if "forward" in drawn else {})
        return {kind: name for kind, name in names.items() if kind in drawn}

    @property
    def label_width(self) -> float:
        labels = [row.label for panel in self.panels for row in panel.rows]
        return _LETTER * max(map(len, labels)) + _LABEL_ROOM

    @property
    def dense(self) -> bool:
        """Whether there are too many bars for edges and titles."""
        bars = sum(len(row.pieces) for panel in self.panels for row in panel.rows)
        return bars > _MOST_TITLED_BARS

    @property
    def wide(self) -> bool:
        """Whether it scrolls on a narrow screen, since it could not be read if it shrank."""
        return self.plot_width > PLOT_WIDTH


_MOST_ROWS = 16
_WIDEST_PLOT = 1100.0
_WIDTH_PER_BAR = 10.0
_LARGEST_RATIO_ON_ONE_AXIS = 6.0


def waterfall(explanation: Explanation) -> Chart:
    """The baseline's mean step, what was taken away and added, this run's mean step."""
    before, after = explanation.baseline, explanation.run
    rows = [Row(label="baseline", pieces=_split(before), note=f"{before.step_ms:,.0f}")]
    level_ms = before.step_ms
    for change, kind in zip(
        explanation.changes, ("computing", "waiting", "rest", "noise"), strict=False
    ):
        start_ms = min(level_ms, level_ms + change.ms)
        piece = Piece(kind=kind, start_ms=start_ms, ms=abs(change.ms))
        rows.append(Row(label=change.name, pieces=(piece,), note=change.signed))
        level_ms += change.ms
    rows.append(Row(label="this run", pieces=_split(after), note=f"{after.step_ms:,.0f}"))
    spoken = ", ".join(f"{row.label} {row.note} ms" for row in rows)
    end_ms = max(row.end_ms for row in rows)
    panel = Panel(heading="", rows=tuple(rows), end_ms=end_ms)
    return Chart(alt=f"Waterfall: {spoken}.", panels=(panel,))


def _split(split: TimeSplit) -> tuple[Piece, ...]:
    parts = {"computing": split.compute_ms, "waiting": split.waiting_ms, "rest": split.rest_ms}
    starts_ms = accumulate(parts.values(), initial=0.0)
    return tuple(
        Piece(kind=kind, start_ms=start_ms, ms=ms, title=f"{kind}: {ms:,.4g} ms")
        for (kind, ms), start_ms in zip(parts.items(), starts_ms, strict=False)
    )


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last included."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[place] for place in places.tolist()]


def step_chart(timelines: Mapping[str, Timeline]) -> Chart:
    """Stages of ranks as rows, time to the right; what no bar covers is waiting.

    Args:
        timelines: of one step, by their names.
    """
    views = list(timelines.values())
    shown = _shown_places(views)
    most_bars = max(len(spans) for view in views for spans in view.spans.values())
    ends_ms = [max(view.makespan_ms, 1e-9) for view in views]
    remarks = [
        f"{name}: {'; '.join((view.source, *view.remarks))}" for name, view in timelines.items()
    ]
    if max(ends_ms) <= _LARGEST_RATIO_ON_ONE_AXIS * min(ends_ms):
        ends_ms = [max(ends_ms)] * len(ends_ms)
    else:
        remarks.append("times differ so much that every panel has an axis of its own")
    ranks, drawn = (
        len({rank for rank, _ in places})
        for places in ([place for view in views for place in view.spans], shown)
    )
    if drawn < ranks:
        remarks.append(f"{drawn} of {ranks} ranks, from the first to finish to the last")
    panels = tuple(
        Panel(heading=_heading(name, view), rows=_rows(name, view, shown), end_ms=end_ms)
        for (name, view), end_ms in zip(timelines.items(), ends_ms, strict=True)
    )
    return Chart(
        alt=". ".join(panel.heading for panel in panels),
        panels=panels,
        remarks=tuple(remarks),
        plot_width=float(np.clip(_WIDTH_PER_BAR * most_bars, PLOT_WIDTH, _WIDEST_PLOT)),
        row_height=float(np.clip(110 / len(shown), 13.0, 20.0)),
    )


def _shown_places(views: Sequence[Timeline]) -> tuple[Place, ...]:
    """All places, or those of ranks evenly chosen from the slowest to the fastest."""
    places = sorted({place for view in views for place in view.spans})
    most = max(1, _MOST_ROWS // len({stage for _, stage in places}))
    end_ms: dict[int, float] = {}
    for (rank, _), spans in views[0].spans.items():
        end_ms[rank] = max(end_ms.get(rank, 0.0), *(span.end_ms for span in spans))
    if len(end_ms) <= most:
        return tuple(places)
    chosen = _evenly(sorted(end_ms, key=lambda rank: (-end_ms[rank], rank)), most)
    return tuple(place for place in places if place[0] in chosen)


def _rows(name: str, view: Timeline, shown: tuple[Place, ...]) -> tuple[Row, ...]:
    one_stage = len({stage for _, stage in shown}) == 1
    first = dict(reversed(shown))
    waiting = Piece(kind="waiting", start_ms=0.0, ms=view.makespan_ms)
    rows = []
    for place in shown:
        rank, stage = place
        label = f"rank {rank}" if one_stage else f"rank {rank}  stage {stage}"
        pieces = [_piece(name, view, place, span) for span in view.spans.get(place, ())]
        rows.append(
            Row(label=label if first[rank] == stage else str(stage), pieces=(waiting, *pieces))
        )
    return tuple(rows)


def _piece(name: str, view: Timeline, place: Place, span: Span) -> Piece:
    """A forward or backward; backwards show the budget of the longest sample."""
    rank, stage = place
    segment, held = view.segment_words(place, span), view.held(place, span)
    title = (
        f"{name}: rank {rank}, stage {stage}, {span.direction} of micro-batch "
        f"{span.position}{segment}, {span.ms:,.4g} ms"
    )
    text, backward = "", span.direction == "backward"
    if held is not None:
        title += f", {held.tokens // held.cp_size:,} tokens"
        if held.budgets_LS.size:
            # The mean over a stage's layers, in blocks.
            budget = float(held.budgets_LS[:, int(np.argmax(held.lengths_tokens))].mean())
            title += f", budget {budget:.1f} blocks"
            text = f"{budget:.0f}" if backward else ""
    return Piece(
        kind="computing" if backward else "forward",
        start_ms=span.start_ms,
        ms=span.ms,
        text=text,
        title=title,
        marked=held is not None and held.cp_size > 1,
    )


def _heading(name: str, view: Timeline) -> str:
    waiting = 1.0 - view.busy_share
    return f"{name}: {shown_ms(view.makespan_ms)} ms, stages wait {waiting:.0%} of it"
