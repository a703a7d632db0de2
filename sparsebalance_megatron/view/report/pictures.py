# SPDX-License-Identifier: Apache-2.0
"""Operations of one step with their measured times, and pictures of steps: SVG by matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.log.records import Place, RankStep, StepRecord
from sparsebalance_megatron.text_table import shown_ms
from sparsebalance_megatron.view.report.numbers import time_parts, window_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "waiting": "#f0a13c",
    "forward": "#8fbde2",
    "backward": "#1f6fb2",
}
_INK, _BESIDE, _FAINT = "#1b1d20", "#8a8f98", "#e3e6ea"
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
_WIDTH_INCHES = 11.0
_EDGES_PER_ROW = 100.0
"""Points of a row's width that edges take at most."""
_MOST_ROWS = 16
_LARGEST_RATIO_ON_ONE_AXIS = 6.0
_LONGEST_WAIT_S = 60.0
"""For data, of one rank, while others of its step already compute."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one run: forwards and backwards of every stage, in ms since the step began.

    ``waiting_share``: of the step's time, the mean over stages; None where it was not measured.
    ``remarks``: what is not in it.
    """

    spans: Mapping[Place, Sequence[Span]]
    waiting_share: float | None = None
    remarks: tuple[str, ...] = ()

    @property
    def makespan_ms(self) -> float:
        return max(span.end_ms for spans in self.spans.values() for span in spans)


def measured_timeline(record: StepRecord, ranks: Mapping[Place, RankStep]) -> Timeline | None:
    """What the ranks logged of a step; None where none did.

    Ranks are set side by side by the wall clocks of their hosts, as long as those can be right:
    ranks begin a step together to within what they wait for data, so clocks that lie further apart
    were set wrong, or set anew in the middle of the step.
    """
    starts_s = {
        place: step.start_unix_s
        for place, step in sorted(ranks.items())
        if step.spans and step.start_unix_s is not None
    }
    if not starts_s:
        return None
    remarks = []
    if missing := [place for place in record.places if place not in starts_s]:
        remarks.append(f"{named_places(missing)}: nothing logged of this step")
    longest_ms = max(span.end_ms for place in starts_s for span in ranks[place].spans)
    if max(starts_s.values()) - min(starts_s.values()) > _LONGEST_WAIT_S + longest_ms / 1e3:
        remarks.append("the wall clocks of ranks disagree: all are drawn from the step's start")
        starts_s = dict.fromkeys(starts_s, 0.0)
    first_s, spans = min(starts_s.values()), {}
    for place, start_s in starts_s.items():
        offset_ms = (start_s - first_s) * 1e3
        spans[place] = [
            span._replace(start_ms=offset_ms + span.start_ms, end_ms=offset_ms + span.end_ms)
            for span in ranks[place].spans
        ]
    return Timeline(spans=spans, waiting_share=record.figures.waiting_share, remarks=tuple(remarks))


def named_places(places: Sequence[Place]) -> str:
    shown = ", ".join(f"rank {rank} stage {stage}" for rank, stage in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def step_picture(timelines: Mapping[str, Timeline]) -> tuple[str, list[str]]:
    """Stages of ranks as rows, time to the right; what no bar covers is waiting. An SVG element,
    and what is known and not drawn."""
    views = list(timelines.values())
    shown = _shown_places(views)
    remarks = [
        f"{name}: {'; '.join(view.remarks)}" for name, view in timelines.items() if view.remarks
    ]
    ends_ms = [max(view.makespan_ms, 1e-9) for view in views]
    if max(ends_ms) <= _LARGEST_RATIO_ON_ONE_AXIS * min(ends_ms):
        ends_ms = [max(ends_ms)] * len(ends_ms)
    ranks = {rank for view in views for rank, _ in view.spans}
    drawn = {rank for rank, _ in shown}
    if drawn < ranks:
        remarks.append(f"{len(drawn)} of {len(ranks)} ranks, from the first to finish to the last")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows_height = float(np.clip(1.5 / len(shown), 0.16, 0.25)) * len(shown)
    size = _WIDTH_INCHES, (rows_height + 0.5) * len(views) + 0.3
    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(views), squeeze=False)[:, 0]
        for axes, (name, view), end_ms in zip(panels, timelines.items(), ends_ms, strict=True):
            _draw_step(axes, view, shown)
            axes.set_xlim(0.0, end_ms)
            title = f"{name}: {shown_ms(view.makespan_ms)} ms"
            if view.waiting_share is not None:
                title += f", stages wait {view.waiting_share:.0%} of it"
            axes.set_title(title)
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        return _svg(figure), remarks


def history_picture(logs: Mapping[str, RunLog]) -> str:
    """Step time, share of waiting and loss over the steps of some runs, as an SVG element."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = dict(zip(reversed(list(logs)), (COLOURS["backward"], _BESIDE), strict=False))
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 5.4), layout="constrained")
        panels = figure.subplots(3, sharex=True)
        for name, log in logs.items():
            parts = time_parts(log.steps)
            step_ms = parts.sum(axis=1)
            iterations = [step.iteration for step in log.steps]
            losses = [math.nan if step.lm_loss is None else step.lm_loss for step in log.steps]
            mean_losses = window_losses(log.steps)
            panels[2].plot(iterations, losses, lw=0.6, alpha=0.4, color=colours[name])
            for axes, steps, values in (
                (panels[0], iterations, step_ms),
                (panels[1], iterations, parts[:, 1] / step_ms),
                (panels[2], list(mean_losses), list(mean_losses.values())),
            ):
                axes.plot(steps, values, ".-", ms=3, lw=1.0, color=colours[name], label=name)
        has_windows = any(step.window for log in logs.values() for step in log.steps)
        loss = "loss; bold: mean over a window" if has_windows else "loss"
        for axes, title in zip(panels, ("step, ms", "share of waiting", loss), strict=True):
            axes.set_title(title)
            axes.grid(axis="y")
            axes.locator_params(nbins=5)
            axes.yaxis.set_major_formatter("{x:,g}")
        panels[0].legend()
        return _svg(figure)


def _svg(figure: "Figure") -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=_WITHOUT_METADATA)
    text = file.getvalue()
    return text[text.index("<svg") :]


def _shown_places(views: Sequence[Timeline]) -> list[Place]:
    """All places, or those of ranks evenly chosen from the slowest to the fastest."""
    places = sorted({place for view in views for place in view.spans})
    most = max(1, _MOST_ROWS // len({stage for _, stage in places}))
    end_ms: dict[int, float] = {}
    for (rank, _), spans in views[0].spans.items():
        end_ms[rank] = max(end_ms.get(rank, 0.0), *(span.end_ms for span in spans))
    if len(end_ms) <= most:
        return places
    slowest_first = sorted(end_ms, key=lambda rank: (-end_ms[rank], rank))
    evenly = np.linspace(0, len(slowest_first) - 1, most).round().astype(int)
    chosen = {slowest_first[number] for number in evenly.tolist()}
    return [place for place in places if place[0] in chosen]


def _draw_step(axes: "Axes", view: Timeline, shown: Sequence[Place]) -> None:
    """Bars of a step's rows."""
    first = dict(reversed(shown))
    one_stage = len({stage for _, stage in shown}) == 1
    labels = []
    for row, (rank, stage) in enumerate(shown):
        spans = view.spans.get((rank, stage), ())
        of_rank = f"rank {rank}" if one_stage else f"rank {rank}  stage {stage}"
        labels.append(of_rank if first[rank] == stage else str(stage))
        axes.barh(row, view.makespan_ms, color=COLOURS["waiting"], linewidth=0.0)
        axes.barh(
            [row] * len(spans),
            [span.ms for span in spans],
            left=[span.start_ms for span in spans],
            color=[COLOURS[span.direction] for span in spans],
            edgecolor="white",
            linewidth=min(0.6, _EDGES_PER_ROW / max(len(spans), 1)),
        )
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter("{x:,g} ms")
    axes.locator_params(axis="x", nbins=6)
