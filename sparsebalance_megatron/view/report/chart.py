# SPDX-License-Identifier: Apache-2.0
"""Bars on a time axis: the form of most pictures of a report, which ``templates/`` draw as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    "forward": "forward",
    "computing": "computing",
    "waiting": "waiting",
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
