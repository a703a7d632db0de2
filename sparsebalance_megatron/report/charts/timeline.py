# SPDX-License-Identifier: Apache-2.0
"""One step drawn: ranks and stages as rows, time to the right, micro-batches as bars.

Shape legend: L layers, S samples of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.report.charts.figure import (
    FAINT,
    MUTED,
    PAPER,
    PREDICTED,
    WIDTH_INCHES,
    Picture,
    absent,
    draw,
    hover_id,
)
from sparsebalance_megatron.report.timeline import Bar, Timeline
from sparsebalance_megatron.telemetry.rank_record import Place, RankStep

KEY, TITLE = "timeline", "One step"
MAX_ROWS = 16
_MAX_VECTOR_BARS = 3000
_BAR_HEIGHT = 0.86
_OPACITY = {"forward": 0.5, "backward": 1.0}
_MAX_BARS_WITH_HOVER = 600
_GAP_BETWEEN_RANKS = 0.4
_COLOURS = (0.15, 0.93)
_LABEL_POINTS_PER_CHARACTER = 4.2
_LARGEST_RATIO_ON_ONE_AXIS = 6.0


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A timeline with what its micro-batches held; ``contents`` may be empty."""

    name: str
    timeline: Timeline
    contents: Mapping[Place, RankStep]


def timeline_picture(
    iteration: int, panels: Sequence[Panel], missing: Sequence[str] = ()
) -> Picture:
    """The panels one above the other on a common time axis.

    Args:
        iteration: of the step.
        missing: sentences on panels that there should have been.
    """
    title = f"{TITLE}: iteration {iteration}"
    if not panels:
        return absent(KEY, title, " ".join(missing))
    shown = shown_places(panels)
    scale = _Scale(panels)
    rows = Counter((panel.name, bar.place) for panel in panels for bar in panel.timeline.bars)
    width = float(np.clip(0.13 * max(rows.values()), WIDTH_INCHES, 14.0))
    row_inches = float(np.clip(2.4 / len(shown), 0.19, 0.42))
    rows_inches = row_inches * (len(shown) + _GAP_BETWEEN_RANKS * len({rank for rank, _ in shown}))
    height = len(panels) * (rows_inches + (0.42 if _share_axis(panels) else 0.65)) + 0.75
    return Picture(
        key=KEY,
        title=title,
        caption=" ".join([_caption(panels, shown, scale), *missing]),
        alt=f"Timeline of iteration {iteration}. " + ". ".join(map(_heading, panels)),
        svg=draw(
            KEY,
            lambda figure: _paint(figure, panels, shown, scale, width, row_inches),
            height=height,
            width=width,
        ),
        wide=width > WIDTH_INCHES,
    )


def shown_places(panels: Sequence[Panel]) -> tuple[Place, ...]:
    """All places, or those of ranks evenly chosen from the fastest to the slowest."""
    places = sorted({place for panel in panels for place in panel.timeline.places})
    ranks = sorted({rank for rank, _ in places})
    stages = len({stage for _, stage in places})
    room = max(1, MAX_ROWS // stages)
    if len(ranks) <= room:
        return tuple(places)
    end_ms: dict[int, float] = {}
    for bar in panels[0].timeline.bars:
        end_ms[bar.place[0]] = max(end_ms.get(bar.place[0], 0.0), bar.end_ms)
    by_end = sorted(end_ms, key=lambda rank: (-end_ms[rank], rank))
    chosen = {by_end[i] for i in np.linspace(0, len(by_end) - 1, room).round().astype(int)}
    return tuple(place for place in places if place[0] in chosen)


class _Scale:
    """Colour of a micro-batch: by its tokens where they are known, or else by its time."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        self.tokens = {
            (panel.name, place[0], micro_batch.position): micro_batch.tokens // micro_batch.width
            for panel in panels
            for place, step in panel.contents.items()
            for micro_batch in step.micro_batches
        }
        self.by_tokens = bool(self.tokens)
        if self.by_tokens:
            self.largest: float = max(self.tokens.values())
        else:
            self.largest = max(bar.ms for panel in panels for bar in panel.timeline.bars)

    @property
    def label(self) -> str:
        return "tokens in the micro-batch" if self.by_tokens else "ms of the forward or backward"

    def share(self, panel: Panel, bar: Bar) -> float | None:
        """0 to 1; None where the micro-batch's tokens are not known."""
        if not self.by_tokens:
            return bar.ms / self.largest
        tokens = self.tokens.get((panel.name, bar.place[0], bar.position))
        return None if tokens is None else tokens / self.largest


def _paint(
    figure: Any,
    panels: Sequence[Panel],
    shown: tuple[Place, ...],
    scale: _Scale,
    width: float,
    row_inches: float,
) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    colours = ListedColormap(colormaps["viridis"](np.linspace(*_COLOURS, 256)))
    ends_ms = [max(panel.timeline.makespan_ms, 1e-9) for panel in panels]
    shared = _share_axis(panels)
    if shared:
        ends_ms = [max(ends_ms)] * len(panels)
    axes = figure.subplots(len(panels), 1, sharex=shared, squeeze=False)[:, 0]
    rows = _rows(shown)
    for axis, panel, end_ms in zip(axes, panels, ends_ms, strict=True):
        points_per_ms = 0.85 * width * 72 / end_ms
        _paint_panel(axis, panel, rows, scale, colours)
        if row_inches > 0.17:
            _paint_budgets(axis, panel, rows, scale, colours, points_per_ms)
        axis.set_title(_heading(panel))
        axis.set_yticks(list(rows.values()), _labels(shown))
        axis.set_ylim(max(rows.values()) + 0.6, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        has_axis = axis is axes[-1] or not shared
        axis.spines["bottom"].set_visible(has_axis)
        axis.tick_params(axis="x", length=3 if has_axis else 0)
        axis.set_xlim(0, end_ms * 1.01)
    axes[-1].set_xlabel("ms since the step began")
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, scale.largest), colours),
        ax=list(axes),
        orientation="horizontal",
        shrink=0.6 * WIDTH_INCHES / width,
        aspect=40,
        ticks=MaxNLocator(4),
        pad=0.02,
    )
    bar.set_label(scale.label)
    bar.outline.set_visible(False)
    bar.ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _share_axis(panels: Sequence[Panel]) -> bool:
    """Whether all panels can be read on one time axis: predicted times may be relative only."""
    makespans_ms = [panel.timeline.makespan_ms for panel in panels]
    return max(makespans_ms) <= _LARGEST_RATIO_ON_ONE_AXIS * min(makespans_ms)


def _rows(shown: tuple[Place, ...]) -> dict[Place, float]:
    """Where each place lies on the vertical axis; ranks stand a little apart."""
    stages = len({stage for _, stage in shown})
    rows, y, previous = {}, 0.0, None
    for place in shown:
        if previous is not None:
            apart = previous != place[0] and stages > 1
            y += 1.0 + _GAP_BETWEEN_RANKS * apart
        rows[place], previous = y, place[0]
    return rows


def _labels(shown: tuple[Place, ...]) -> list[str]:
    if len({stage for _, stage in shown}) == 1:
        return [f"rank {rank}" for rank, _ in shown]
    first = dict(reversed(shown))
    return [
        f"rank {rank}  stage {stage}" if first[rank] == stage else str(stage)
        for rank, stage in shown
    ]


def _paint_panel(
    axis: Any, panel: Panel, rows: Mapping[Place, float], scale: _Scale, colours: Any
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Polygon

    bars = [bar for bar in panel.timeline.bars if bar.place in rows]
    many = len(bars) > _MAX_VECTOR_BARS
    axis.barh(list(rows.values()), panel.timeline.makespan_ms, height=_BAR_HEIGHT, color=FAINT)
    faces = [_face(bar, scale.share(panel, bar), colours) for bar in bars]
    shared = shared_rows(panel.contents)
    edges = [
        PREDICTED if (bar.place[0], bar.position) in shared else "none" if many else PAPER
        for bar in bars
    ]
    if len(bars) <= _MAX_BARS_WITH_HOVER:
        for bar, face, edge in zip(bars, faces, edges, strict=True):
            axis.add_patch(
                Polygon(
                    _corners(bar, rows[bar.place]),
                    facecolor=face,
                    edgecolor=edge,
                    linewidth=0.5,
                    gid=hover_id(_in_words(panel, bar, scale)),
                )
            )
        return
    axis.add_collection(
        PolyCollection(
            [_corners(bar, rows[bar.place]) for bar in bars],
            facecolors=faces,
            edgecolors=edges,
            linewidths=0 if many and not shared else 0.5,
            rasterized=many,
        )
    )


def _face(bar: Bar, share: float | None, colours: Any) -> tuple[Any, float]:
    """Colour and opacity."""
    return (MUTED if share is None else colours(share)[:3], _OPACITY[bar.direction])


def _in_words(panel: Panel, bar: Bar, scale: _Scale) -> str:
    """What a bar says when it is pointed at."""
    rank, stage = bar.place
    tokens = scale.tokens.get((panel.name, rank, bar.position))
    budget = stage_budgets(panel.contents).get((bar.place, bar.position))
    parts = [
        f"{panel.name}: rank {rank}, stage {stage}, {bar.direction} of micro-batch {bar.position}",
        f"{bar.ms:,.4g} ms",
        *([] if tokens is None else [f"{tokens:,} tokens"]),
        *([] if budget is None else [f"budget {budget:.1f} blocks"]),
    ]
    return ", ".join(parts)


def _corners(bar: Bar, y: float) -> list[tuple[float, float]]:
    half = _BAR_HEIGHT / 2
    return [
        (bar.start_ms, y - half),
        (bar.end_ms, y - half),
        (bar.end_ms, y + half),
        (bar.start_ms, y + half),
    ]


def _paint_budgets(
    axis: Any,
    panel: Panel,
    rows: Mapping[Place, float],
    scale: _Scale,
    colours: Any,
    points_per_ms: float,
) -> None:
    """Budgets inside backward bars, where they fit."""
    budgets = stage_budgets(panel.contents)
    for bar in panel.timeline.bars:
        budget = budgets.get((bar.place, bar.position))
        if bar.direction != "backward" or bar.place not in rows or budget is None:
            continue
        text = f"{budget:.0f}"
        if bar.ms * points_per_ms < 3 + _LABEL_POINTS_PER_CHARACTER * len(text):
            continue
        share = scale.share(panel, bar)
        dark = share is None or share < 0.6
        axis.text(
            (bar.start_ms + bar.end_ms) / 2,
            rows[bar.place],
            text,
            fontsize=6.5,
            ha="center",
            va="center_baseline",
            color="white" if dark else "black",
        )


def shared_rows(contents: Mapping[Place, RankStep]) -> set[tuple[int, int]]:
    """(rank, position) of the micro-batches whose rows lay on several ranks."""
    return {
        (place[0], micro_batch.position)
        for place, step in contents.items()
        for micro_batch in step.micro_batches
        if micro_batch.width > 1
    }


def stage_budgets(contents: Mapping[Place, RankStep]) -> dict[tuple[Place, int], float]:
    """Budget of the longest sample of every micro-batch, the mean over a stage's layers."""
    return {
        (place, micro_batch.position): float(
            micro_batch.budgets_LS[:, int(np.argmax(micro_batch.lengths_tokens))].mean()
        )
        for place, step in contents.items()
        for micro_batch in step.micro_batches
        if micro_batch.budgets_LS.size
    }


def _heading(panel: Panel) -> str:
    waiting = 1.0 - panel.timeline.busy_share
    ms = panel.timeline.makespan_ms
    length = f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"
    return f"{panel.name}: {length} ms, stages wait {waiting:.0%} of it"


def _caption(panels: Sequence[Panel], shown: tuple[Place, ...], scale: _Scale) -> str:
    ranks = {rank for panel in panels for rank, _ in panel.timeline.places}
    parts = [
        "Each row is a pipeline stage of a data-parallel rank, time runs to the right. Pale bars "
        "are forwards, full bars backwards, and what stays grey is a bubble: the stage waits."
    ]
    if scale.by_tokens:
        parts.append(
            "Colour is the number of tokens in the micro-batch; the number in a backward is the "
            "budget of its longest sample in blocks, the mean over the stage's layers."
        )
        if any(shared_rows(panel.contents) for panel in panels):
            parts.append(
                "Bars with a coloured edge are rows that neighbouring ranks shared; their colour "
                "is the number of tokens per rank."
            )
    else:
        parts.append(
            "Colour is the time of the bar: lengths and budgets are in ranks/, which holds nothing "
            "of this step."
        )
    for panel in panels:
        remarks = "".join(f"; {remark}" for remark in panel.timeline.remarks)
        parts.append(f"{panel.name.capitalize()}: {panel.timeline.source}{remarks}.")
    if not _share_axis(panels):
        parts.append("Times differ so much that every panel has a time axis of its own.")
    drawn = {rank for rank, _ in shown}
    if len(drawn) < len(ranks):
        parts.append(
            f"{len(drawn)} of {len(ranks)} ranks are drawn, from the first to finish to the last."
        )
    return " ".join(parts)
