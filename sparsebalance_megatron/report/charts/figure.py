# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report: Matplotlib's SVG, in colours that follow the page's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WIDTH_INCHES = 4.6
"""Sized for a phone held upright; type stays legible there, and grows on a wider screen."""

INK, MUTED, FAINT, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
RUN, BASELINE, PREDICTED = "#0d0e0f", "#101112", "#131415"
"""Stand-ins that the page's style sheet replaces, one value per theme."""

LIGHT_THEME = {
    "ink": "#1b1d20",
    "muted": "#6b7078",
    "faint": "#e7e9ec",
    "paper": "#ffffff",
    "run": "#1f6fb2",
    "baseline": "#90959c",
    "predicted": "#cf5a23",
}
"""Colours of the style sheet's variables; a picture without a page has these."""

_VARIABLES = dict(
    zip((INK, MUTED, FAINT, PAPER, RUN, BASELINE, PREDICTED), LIGHT_THEME, strict=True)
)
"""Stand-in to variable."""

_STYLE = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "text.color": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "hatch.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
}


_HOVER = "hover "


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture of a report with what it says in words.

    ``svg`` is None where the logs do not hold what it needs; ``caption`` then says what is missing.
    ``wide``: scrolls sideways on a narrow screen rather than shrinking below reading size.
    """

    key: str
    title: str
    caption: str
    alt: str = ""
    svg: str | None = None
    wide: bool = False


def absent(key: str, title: str, reason: str) -> Picture:
    """A picture that cannot be drawn, and why."""
    return Picture(key=key, title=title, caption=reason)


def draw(
    key: str, painter: Callable[[Any], None], *, height: float, width: float = WIDTH_INCHES
) -> str:
    """The SVG of what ``painter`` draws on a Matplotlib figure of that size in inches.

    Raises:
        ReportError: if matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(
            "the report needs matplotlib: pip install 'sparsebalance-megatron[tools]'"
        ) from error
    stream = io.StringIO()
    # The salt makes ids repeat from run to run, and differ between the pictures of one page.
    with rc_context({**_STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        painter(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return _embedded(stream.getvalue(), width)


def hover_id(words: str) -> str:
    """The id of an artist that shows ``words`` when it is pointed at."""
    return _HOVER + words


def standalone(svg: str) -> str:
    """A file of its own from what :func:`draw` made for a page."""
    for name, colour in LIGHT_THEME.items():
        svg = svg.replace(f"var(--{name})", colour)
    style = "font-family: sans-serif; stroke-linejoin: round"
    svg = re.sub(r'style="--inches: ([\d.]+)"', rf'width="\1in" style="{style}"', svg, count=1)
    # The first shape is the figure's own background.
    return svg.replace("fill: none", f"fill: {LIGHT_THEME['paper']}", 1)


def _embedded(svg: str, width: float) -> str:
    """The bare element, to be named and sized by the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (width|height|version)="[^"]*"', "", opening)
    opening += f' style="--inches: {width:g}">'
    rest = re.sub(rf'<g id="{_HOVER}([^"]*)">', r"<g><title>\1</title>", rest)
    rest = re.sub(r'<g id="[^"]*"', "<g", rest)
    rest = re.sub(r" ?font-family: [^;\"]*;?", "", rest)
    rest = re.sub(r"<[^>]*>", _with_fewer_digits, rest)
    for colour, name in _VARIABLES.items():
        rest = rest.replace(colour, f"var(--{name})")
    return opening + rest


def _with_fewer_digits(tag: re.Match[str]) -> str:
    """A hundredth of a point is below what a screen shows. Texts stand between tags."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0])
