# SPDX-License-Identifier: Apache-2.0
"""One HTML page that needs nothing beside itself: text, tables, and pictures as SVG elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sparsebalance_megatron.report.charts.figure import LIGHT_THEME, Picture

_LIGHT = " ".join(f"--{name}: {colour};" for name, colour in LIGHT_THEME.items())
_STYLE = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
"""
    """\
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --ink: #e8eaed; --muted: #9aa0a8; --faint: #2e3238;
    --run: #62aee8; --baseline: #7d838b; --predicted: #f0925f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.1rem; margin: 0 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 44rem; }
.headline { font-size: 1.15rem; margin: 1rem 0 0; }
.quiet, figcaption, summary { color: var(--muted); font-size: 0.875rem; }
figcaption { margin-top: 0.5rem; max-width: 44rem; }
figure { margin: 0; min-width: 0; }
section { margin: 1.5rem 0 2.5rem; }
section > div { min-width: 0; }
.pictures {
  display: grid; gap: 2.5rem 3rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr));
}
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; max-width: calc(var(--inches) * 120px); height: auto; }
svg * { stroke-linejoin: round; }
svg text { font-family: system-ui, sans-serif; }
.wide svg { min-width: calc(var(--inches) * 75px); }
table {
  border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem;
  line-height: 1.35; overflow-wrap: normal;
}
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: right; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--muted); }
td { border-bottom: 1px solid var(--faint); }
.names th:first-child, .names td:first-child { text-align: left; }
.names td:last-child, .names th:last-child { text-align: left; color: var(--muted); }
.steps td { white-space: nowrap; }
.below { margin-top: 2rem; }
.below th, .below td { padding-right: 0.4rem; }
.all-columns { grid-column: 1 / -1; }
li { max-width: 60rem; }
"""
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows; ``style``: a class of the page's style sheet."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    style: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a report says, in reading order.

    ``headline`` is the one sentence that counts, and ``reasons`` are the pictures of where the time
    went. ``step_table`` is in a fold below the ``timeline``; ``notes`` is what the logs lack.
    """

    title: str
    subtitle: str
    headline: str
    reasons: Sequence[Picture]
    findings: Sequence[str]
    numbers: Table
    worst_steps: Table
    timeline: Picture
    step_table: Table
    pictures: Sequence[Picture]
    notes: Sequence[str]


def render(page: Page) -> str:
    """The whole document."""
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(page.title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(page.title)}</h1>",
        f'<p class="quiet">{escape(page.subtitle)}</p>',
        f'<p class="headline">{escape(page.headline)}</p>',
        '<section class="pictures">',
        *(_figure(picture) for picture in page.reasons),
        "</section>",
        '<section class="pictures">',
        '<div class="all-columns">' if page.timeline.wide else "<div>",
        _figure(page.timeline),
        *_fold(page.step_table),
        "</div>",
        "<div>",
        *(f"<p>{escape(finding)}</p>" for finding in page.findings),
        _table(page.numbers),
        *_worst(page.worst_steps),
        "</div>",
        "</section>",
        '<section class="pictures">',
        *(_figure(picture) for picture in page.pictures),
        "</section>",
        *_notes(page.notes),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _figure(picture: Picture) -> str:
    heading = f"<h2>{escape(picture.title)}</h2>"
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    if picture.svg is None:
        return f"<figure>{heading}\n{caption}</figure>"
    described = f'<svg role="img" aria-label="{escape(picture.alt)}"'
    svg = picture.svg.replace("<svg", described, 1)
    style = "scroll wide" if picture.wide else "scroll"
    return f'<figure>{heading}\n<div class="{style}">{svg}</div>\n{caption}</figure>'


def _table(table: Table) -> str:
    rows = [_row("th", table.headings), *(_row("td", row) for row in table.rows)]
    lines = "\n".join(rows)
    return f'<div class="scroll"><table class="{table.style}">\n{lines}\n</table></div>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _fold(table: Table) -> list[str]:
    if not table.rows:
        return []
    words = f"<summary>{len(table.rows)} micro-batches of this step in numbers</summary>"
    return [f"<details>{words}", _table(table), "</details>"]


def _worst(table: Table) -> list[str]:
    if not table.rows:
        return []
    words = (
        "Steps that lost most time against their prediction, and the micro-batch in which it was "
        "lost; the ratio is measured over predicted, relative to the step's own."
    )
    return [
        '<div class="below"><h2>The worst steps</h2>',
        _table(table),
        f'<p class="quiet">{words}</p>',
        "</div>",
    ]


def _notes(notes: Sequence[str]) -> list[str]:
    if not notes:
        return []
    items = [f"<li>{escape(note)}</li>" for note in notes]
    return ["<section><h2>What the logs lack</h2><ul>", *items, "</ul></section>"]
