# SPDX-License-Identifier: Apache-2.0
"""One step of two runs, drawn: what every rank computed, and how long it waited for the slowest."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from sparsebalance_megatron.telemetry.step_log import RunLog
from sparsebalance_megatron.telemetry.step_record import Step

_WAITING = "0.9"
_INCHES_PER_ROW = 0.45


class PictureError(ValueError):
    """There is nothing to draw, or nothing to draw it with."""


def draw_step(baseline: RunLog, balanced: RunLog, path: Path) -> int:
    """Draw the step whose imbalance in the baseline is nearest to the median; return its iteration.

    Both runs place the same samples in that step. A bar is a micro-batch, forward and backward
    together; colour is its time.

    Raises:
        PictureError: if matplotlib is missing, or the runs share no fully measured step.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            "--picture needs matplotlib: pip install 'sparsebalance-megatron[tools]'"
        ) from error
    first, second = typical_step(baseline, balanced)
    runs = (("fixed budget, order of arrival", first), ("sparse balance", second))
    rows = max(len(_rows(step)) for _, step in runs)
    figure = Figure(figsize=(8, 2 * (rows * _INCHES_PER_ROW + 0.9)), layout="constrained")
    FigureCanvasAgg(figure)
    longest_ms = max(sum(times) for _, step in runs for _, times in _rows(step))
    axes = figure.subplots(2, 1, sharex=True)
    for axis, (title, step) in zip(axes, runs, strict=True):
        _draw_run(axis, title, step)
        axis.set_xlim(0, longest_ms * 1.02)
    axes[-1].set_xlabel(f"computing time in iteration {first.iteration}, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return first.iteration


def typical_step(baseline: RunLog, balanced: RunLog) -> tuple[Step, Step]:
    """The same iteration of both runs, neither the best nor the worst to show.

    Raises:
        PictureError: if the runs share no fully measured step.
    """
    others = {step.iteration: step for step in balanced.steps if step.micro_batch_ms}
    shared = [
        (step, others[step.iteration])
        for step in baseline.steps
        if step.micro_batch_ms and step.iteration in others
    ]
    if not shared:
        raise PictureError(
            f"{baseline.directory} and {balanced.directory} share no step with measured times"
        )
    # The first steps pay for caches and clocks, and tune nothing yet.
    settled = shared[len(shared) // 4 :]
    middle = median(_imbalance(step) for step, _ in settled)
    return min(settled, key=lambda pair: abs(_imbalance(pair[0]) - middle))


def _imbalance(step: Step) -> float:
    totals = [sum(times) for _, times in _rows(step)]
    return max(totals) * len(totals) / sum(totals)


def _rows(step: Step) -> list[tuple[str, tuple[float, ...]]]:
    """(label, micro-batch ms) of every stage of every rank."""
    ranks = step.micro_batch_ms or ()
    return [
        (f"rank {d}" if len(stages) == 1 else f"rank {d}, stage {p}", times)
        for d, stages in enumerate(ranks)
        for p, times in enumerate(stages)
    ]


def _draw_run(axis: Any, title: str, step: Step) -> None:
    from matplotlib import colormaps

    rows = _rows(step)
    slowest_ms = max(sum(times) for _, times in rows)
    heaviest_ms = max(max(times) for _, times in rows)
    for place, (_, times) in enumerate(rows):
        start_ms = 0.0
        for ms in times:
            colour = colormaps["viridis"](0.15 + 0.75 * ms / heaviest_ms)
            axis.barh(place, ms, left=start_ms, color=colour, edgecolor="white", linewidth=0.8)
            start_ms += ms
        axis.barh(place, slowest_ms - start_ms, left=start_ms, color=_WAITING, hatch="//")
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.invert_yaxis()
    axis.set_title(f"{title}: {slowest_ms:,.0f} ms (hatched: waiting)", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
