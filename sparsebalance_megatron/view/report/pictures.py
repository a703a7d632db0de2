# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run, drawn by matplotlib as SVG.

Shape legend: U length buckets, K budgets of the grid.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebalance_megatron.layer_budgets import DENSE, base_budgets
from sparsebalance_megatron.log.records import CoverageRecord, Place, RunHeader
from sparsebalance_megatron.text_table import shown_ms
from sparsebalance_megatron.view.report.numbers import Explanation, TimeSplit
from sparsebalance_megatron.view.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "waiting": "#f0a13c",
    "forward": "#8fbde2",
    "backward": "#1f6fb2",
    "computing": "#1f6fb2",
    "optimizer, gradients": "#b3b8bf",
    "noise": "#9a6bb5",
}
"""A kind of time has one colour in all pictures."""
_INK, _FAINT = "#1b1d20", "#e3e6ea"
_STYLE: dict[Any, Any] = {
    # Text stays text, in the reader's font.
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse balance",
    "font.family": "sans-serif",
    "font.size": 8.0,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "ytick.left": False,
    "text.color": _INK,
    "legend.frameon": False,
}
_WITHOUT_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_NARROW_INCHES, _WIDE_INCHES = 5.5, 13.0
_BARS_PER_INCH = 7.0
_DIGIT_INCHES = 0.08
_EDGES_PER_ROW = 100.0
"""Points of a row's width that edges take at most."""
_MOST_ROWS = 16
_LARGEST_RATIO_ON_ONE_AXIS = 6.0
_MOST_FRAMES, _FRAMES_IN_A_ROW = 6, 3


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG element, and what is known about it and not drawn."""

    svg: str
    remarks: tuple[str, ...] = ()
    wide: bool = False


def step_picture(timelines: Mapping[str, Timeline]) -> Picture:
    """Stages of ranks as rows, time to the right; what no bar covers is waiting.

    Args:
        timelines: of one step, by their names.
    """
    views = list(timelines.values())
    shown = _shown_places(views)
    most_bars = max(len(spans) for view in views for spans in view.spans.values())
    width = float(np.clip(most_bars / _BARS_PER_INCH, _NARROW_INCHES, _WIDE_INCHES))
    remarks = [
        f"{name}: {'; '.join((view.source, *view.remarks))}" for name, view in timelines.items()
    ]
    ends_ms = [max(view.makespan_ms, 1e-9) for view in views]
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
    rows_height = float(np.clip(1.5 / len(shown), 0.16, 0.25)) * len(shown)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(views), squeeze=False)[:, 0]
        for axes, (name, view), end_ms in zip(panels, timelines.items(), ends_ms, strict=True):
            _draw_step(axes, view, shown, digit_ms=_DIGIT_INCHES * end_ms / width)
            axes.set_xlim(0.0, end_ms)
            waiting = 1.0 - view.busy_share
            axes.set_title(
                f"{name}: {shown_ms(view.makespan_ms)} ms, stages wait {waiting:.0%} of it"
            )
        _add_legend(figure, ("waiting", "forward", "backward"))

    svg = _drawn(draw, width, (rows_height + 0.5) * len(views) + 0.3)
    return Picture(svg=svg, remarks=tuple(remarks), wide=width > _NARROW_INCHES)


def _shown_places(views: Sequence[Timeline]) -> tuple[Place, ...]:
    """All places, or those of ranks evenly chosen from the slowest to the fastest."""
    places = sorted({place for view in views for place in view.spans})
    most = max(1, _MOST_ROWS // len({stage for _, stage in places}))
    end_ms: dict[int, float] = {}
    for (rank, _), spans in views[0].spans.items():
        end_ms[rank] = max(end_ms.get(rank, 0.0), *(span.end_ms for span in spans))
    if len(end_ms) <= most:
        return tuple(places)
    slowest_first = sorted(end_ms, key=lambda rank: (-end_ms[rank], rank))
    evenly = np.linspace(0, len(slowest_first) - 1, most).round().astype(int)
    chosen = {slowest_first[number] for number in evenly.tolist()}
    return tuple(place for place in places if place[0] in chosen)


def _draw_step(axes: Axes, view: Timeline, shown: Sequence[Place], digit_ms: float) -> None:
    """Bars of a step's rows; backwards show the budget of the longest sample where it fits."""
    first = dict(reversed(shown))
    one_stage = len({stage for _, stage in shown}) == 1
    labels = []
    for row, (rank, stage) in enumerate(shown):
        spans = view.spans.get((rank, stage), ())
        held = [view.held((rank, stage), span) for span in spans]
        of_rank = f"rank {rank}" if one_stage else f"rank {rank}  stage {stage}"
        labels.append(of_rank if first[rank] == stage else str(stage))
        axes.barh(row, view.makespan_ms, color=COLOURS["waiting"], linewidth=0.0)
        axes.barh(
            [row] * len(spans),
            [span.ms for span in spans],
            left=[span.start_ms for span in spans],
            color=[COLOURS[span.direction] for span in spans],
            edgecolor=[_INK if each and each.cp_size > 1 else "white" for each in held],
            linewidth=min(0.6, _EDGES_PER_ROW / max(len(spans), 1)),
        )
        for span, each in zip(spans, held, strict=True):
            if span.direction == "forward" or each is None or not each.budgets_LS.size:
                continue
            # The mean over a stage's layers, in blocks.
            budget = each.budgets_LS[:, int(np.argmax(each.lengths_tokens))].mean()
            text, middle_ms = f"{budget:.0f}", (span.start_ms + span.end_ms) / 2
            if span.ms > digit_ms * (len(text) + 1):
                axes.text(
                    *(middle_ms, row, text),
                    color="white",
                    size=7,
                    ha="center",
                    va="center_baseline",
                )
    axes.set_yticks(range(len(shown)), labels)
    _time_axis(axes)


def _time_axis(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter("{x:,g} ms")
    axes.locator_params(axis="x", nbins=6)


def waterfall(explanation: Explanation) -> Picture:
    """The baseline's mean step, what was taken away and added, this run's mean step."""
    before, after = explanation.baseline, explanation.run
    kinds = ("computing", "waiting", "optimizer, gradients", "noise")
    changes = explanation.changes
    levels_ms = list(accumulate((each.ms for each in changes), initial=before.step_ms))
    names = ["baseline", *(each.name for each in changes), "this run"]
    notes = [f"{before.step_ms:,.0f}", *(each.signed for each in changes), f"{after.step_ms:,.0f}"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, split in ((0, before), (len(names) - 1, after)):
            _draw_split(axes, row, split)
        ends_ms = [before.step_ms, *map(max, levels_ms, levels_ms[1:]), after.step_ms]
        for row, (change, kind) in enumerate(zip(changes, kinds, strict=False), start=1):
            start_ms = min(levels_ms[row - 1 : row + 1])
            axes.barh(row, abs(change.ms), left=start_ms, color=COLOURS[kind])
        for row, (end_ms, note) in enumerate(zip(ends_ms, notes, strict=True)):
            axes.text(end_ms, row, f" {note}", va="center_baseline")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0.0, max(ends_ms) * 1.1)
        _time_axis(axes)
        _add_legend(figure, kinds if len(changes) == len(kinds) else kinds[:3])

    return Picture(svg=_drawn(draw, _NARROW_INCHES, 0.25 * len(names) + 0.7))


def _draw_split(axes: Axes, row: int, split: TimeSplit) -> None:
    parts = {
        "computing": split.compute_ms,
        "waiting": split.waiting_ms,
        "optimizer, gradients": split.rest_ms,
    }
    starts_ms = accumulate(parts.values(), initial=0.0)
    for (kind, ms), start_ms in zip(parts.items(), starts_ms, strict=False):
        axes.barh(row, ms, left=start_ms, color=COLOURS[kind])


def coverage_picture(record: CoverageRecord | None, config: Mapping[str, Any]) -> Picture | None:
    """The layers' coverage against budget, a frame per length of the longest samples.

    None where no coverage was observed of samples longer than one block.
    """
    if record is None:
        return None
    observed_U = np.isfinite(record.curves_LUK).all(axis=2).any(axis=0)
    # Every budget covers the whole of a document with one block.
    buckets = [u for u in np.flatnonzero(observed_U).tolist() if record.bucket_blocks[u] > 1]
    buckets = buckets[-_MOST_FRAMES:]
    if not buckets:
        return None
    rows = -(-len(buckets) // _FRAMES_IN_A_ROW)

    def draw(figure: Figure) -> None:
        frames = figure.subplots(rows, _FRAMES_IN_A_ROW, squeeze=False, sharey=True).flat
        for axes in frames[len(buckets) :]:
            axes.remove()
        for axes, bucket in zip(frames, buckets, strict=False):
            _draw_coverage(axes, record, bucket, config)

    return Picture(svg=_drawn(draw, 9.0, 1.7 * rows), wide=True)


def _draw_coverage(
    axes: Axes, record: CoverageRecord, bucket: int, config: Mapping[str, Any]
) -> None:
    """The layers' band, their mean and the base budget."""
    blocks, least = record.bucket_blocks[bucket], 1 << bucket
    budgets_K = [budget for budget in record.grid if budget <= blocks]
    curves_LK = record.curves_LUK[:, bucket, : len(budgets_K)]
    curves_LK = curves_LK[np.isfinite(curves_LK).all(axis=1)]
    axes.fill_between(
        budgets_K,
        curves_LK.min(axis=0),
        curves_LK.max(axis=0),
        color=COLOURS["forward"],
        alpha=0.5,
        linewidth=0.0,
    )
    axes.plot(budgets_K, curves_LK.mean(axis=0), color=COLOURS["computing"])
    base, alike = config.get("base_budget"), config.get("layer_budgets") is None
    if alike and isinstance(base, int) and 1 <= base <= budgets_K[-1]:
        axes.axvline(base, color=_INK, linestyle=":", linewidth=1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.0, 1.02)
    axes.grid(axis="y")
    axes.set_title(f"{blocks} blocks" if least >= blocks else f"{least} to {blocks} blocks")


def layers_picture(header: RunHeader | None) -> Picture | None:
    """Base budgets of the layers; None where all have the same, or where that is unknown."""
    config = header.config if header else {}
    if header is None or config.get("layer_budgets") is None:
        return None
    budget_L = base_budgets(config["base_budget"], config["layer_budgets"], header.job.layers)
    if len(set(budget_L)) == 1:
        return None
    most = max([budget for budget in budget_L if budget != DENSE], default=1)
    height_L = [1.2 * most if budget == DENSE else budget for budget in budget_L]
    colours = [COLOURS["computing" if budget == DENSE else "forward"] for budget in budget_L]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.bar(range(len(budget_L)), height_L, color=colours)
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y")
        axes.axhline(config["base_budget"], color=_INK, linestyle=":", linewidth=1.0)

    return Picture(svg=_drawn(draw, 9.0, 1.7), wide=True)


def _add_legend(figure: Figure, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(kinds))


def _drawn(draw: Any, width_inches: float, height_inches: float) -> str:
    """The SVG element of a figure that ``draw`` fills."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata=_WITHOUT_METADATA)
    text = file.getvalue()
    return text[text.index("<svg") :]
