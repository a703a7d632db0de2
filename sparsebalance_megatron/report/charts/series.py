# SPDX-License-Identifier: Apache-2.0
"""Steps as series: imbalance of ranks, iteration times, speedup, loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from sparsebalance_megatron.plan.metrics import imbalance
from sparsebalance_megatron.report.charts.figure import (
    BASELINE,
    MUTED,
    PREDICTED,
    RUN,
    Picture,
    absent,
    draw,
)
from sparsebalance_megatron.report.comparison import paired
from sparsebalance_megatron.telemetry.step_log import RunLog
from sparsebalance_megatron.telemetry.step_record import Step

MAX_POINTS = 300
_SMALLEST_RANGE = 0.02

Series = tuple[np.ndarray, np.ndarray]
"""Iterations and values, NaN where there is none."""


def balance_picture(run: RunLog, baseline: RunLog | None) -> Picture:
    """Imbalance of ranks over steps, and below it the speedup, or iteration times."""
    key, title = "balance", "Balance and speed"
    measured = _of(run, lambda step: _imbalance(step.measured_rank_ms))
    predicted = _of(run, lambda step: _imbalance(step.predicted_rank_ms))
    speed, label, speed_caption = _speed(run, baseline)
    if not (_any(measured) or _any(speed)):
        return absent(key, title, "No step has measured times of all ranks.")
    before = _of(baseline, lambda step: _imbalance(step.measured_rank_ms)) if baseline else None

    def paint(figure: Any) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        if before is not None:
            _line(upper, before, BASELINE, "baseline")
        _line(upper, predicted, PREDICTED, "predicted", dashed=True)
        _line(upper, measured, RUN, "measured")
        upper.set_title("imbalance of ranks, max/mean")
        _line(lower, speed, RUN, "")
        if baseline is not None:
            lower.axhline(1.0, color=MUTED, linewidth=0.7)
        lower.set_title(label)
        for axis in (upper, lower):
            _roomy(axis)
        lower.set_xlabel("iteration")
        _legend(figure, upper)

    return Picture(
        key=key,
        title=title,
        caption="Above: the busiest data-parallel rank's computing time over the mean of the "
        "ranks, step by step; 1 is perfect balance, and what is above 1 others wait. "
        f"{speed_caption} {_binned(run)}".strip(),
        alt=f"Imbalance of ranks over {len(run.steps)} steps, median "
        f"{_median(measured, '.3f')}; {label}, median {_median(speed, '.4g')}.",
        svg=draw(key, paint, height=3.6),
    )


def loss_picture(run: RunLog, baseline: RunLog | None) -> Picture:
    """Loss over steps of both runs."""
    key, title = "loss", "Loss"
    loss = _of(run, lambda step: step.lm_loss)
    if not _any(loss):
        return absent(key, title, "No step has a loss.")
    before = _of(baseline, lambda step: step.lm_loss) if baseline else None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        if before is not None:
            _line(axis, before, BASELINE, "baseline", width=3.0)
        _line(axis, loss, RUN, "sparse balance")
        axis.set_title("language model loss per token")
        axis.set_xlabel("iteration")
        _roomy(axis)
        _legend(figure, axis)

    words = "Loss per token as training saw it."
    if baseline is not None:
        words = (
            "Loss per token of both runs as training saw it. Where the thin line lies on the "
            "broad one, balancing changed nothing that can be seen."
        )
        words += _final_difference(run, baseline)
    return Picture(
        key=key,
        title=title,
        caption=f"{words} {_binned(run)}".strip(),
        alt=f"Loss over {len(run.steps)} steps, last {_last(loss)}"
        + (f", of the baseline {_last(before)}." if before is not None else "."),
        svg=draw(key, paint, height=2.4),
    )


def binned(series: Series, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Iterations and values of at most ``limit`` bins of neighbours: medians, and [2] quantiles.

    Up to ``limit`` points nothing is binned, and the quantiles are the values. NaN where a bin
    holds no value.
    """
    iterations, values = series
    size = -(-len(values) // limit)
    starts = range(0, len(values), max(size, 1))
    middle, low, high = (
        np.array([_quantile(values[start : start + size], q) for start in starts])
        for q in (0.5, 0.1, 0.9)
    )
    places = np.array([iterations[start : start + size].mean() for start in starts])
    return places, middle, np.stack([low, high])


def _quantile(values: np.ndarray, q: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, q)) if len(known) else np.nan


def _of(log: RunLog, value: Callable[[Step], float | None]) -> Series:
    values = [value(step) for step in log.steps]
    return (
        np.array([step.iteration for step in log.steps], dtype=np.float64),
        np.array([np.nan if each is None else each for each in values]),
    )


def _imbalance(times_ms: Sequence[float] | None) -> float | None:
    return imbalance(times_ms) if times_ms else None


def _speed(run: RunLog, baseline: RunLog | None) -> tuple[Series, str, str]:
    """The lower panel: its series, its title, its words."""
    if baseline is None:
        caption = "Below: measured time from the end of one step to the end of the next."
        return _of(run, lambda step: step.iteration_ms), "iteration, ms", caption
    pairs = paired(run, baseline)
    ratios = [
        old.iteration_ms / new.iteration_ms if old.iteration_ms and new.iteration_ms else np.nan
        for old, new in pairs
    ]
    iterations = np.array([new.iteration for _, new in pairs], dtype=np.float64)
    caption = (
        "Below: the baseline's iteration time over this run's, both measured; above the line at 1 "
        "this run is faster."
    )
    unpaired = len(run.steps) - len(pairs)
    if unpaired:
        caption += f" {unpaired} steps have no partner with as many tokens and are left out."
    return (iterations, np.array(ratios)), "speedup, step by step", caption


def _line(
    axis: Any, series: Series, colour: str, label: str, *, dashed: bool = False, width: float = 1.2
) -> None:
    if not _any(series):
        return
    places, middle, (low, high) = binned(series)
    if len(places) < len(series[0]):
        axis.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.plot(
        places,
        middle,
        color=colour,
        label=label,
        linewidth=width,
        linestyle=(0, (2.5, 1.5)) if dashed else "solid",
        marker="." if len(places) <= 30 else None,
        markersize=3.5,
    )


def _roomy(axis: Any) -> None:
    """A constant is drawn as one, not as a noise of rounding."""
    low, high = axis.get_ylim()
    middle = (low + high) / 2
    half = max((high - low) / 2, _SMALLEST_RANGE * abs(middle) / 2)
    axis.set_ylim(middle - half, middle + half)
    axis.ticklabel_format(axis="y", useOffset=False)


def _legend(figure: Any, axis: Any) -> None:
    """Below everything, where no line can run through it."""
    lines, labels = axis.get_legend_handles_labels()
    if len(lines) > 1:
        figure.legend(
            lines,
            labels,
            frameon=False,
            fontsize=8,
            ncols=len(lines),
            loc="outside lower center",
            handlelength=1.6,
        )


def _any(series: Series) -> bool:
    return bool(np.isfinite(series[1]).any())


def _median(series: Series, layout: str) -> str:
    return format(float(np.nanmedian(series[1])), layout) if _any(series) else "not measured"


def _last(series: Series) -> str:
    known = series[1][np.isfinite(series[1])]
    return f"{known[-1]:.4g}" if len(known) else "not measured"


def _binned(run: RunLog) -> str:
    size = -(-len(run.steps) // MAX_POINTS)
    if size == 1:
        return ""
    return f"A point is the median of {size} steps, the shade holds the middle 80 % of them."


def _final_difference(run: RunLog, baseline: RunLog) -> str:
    losses = [
        (old.lm_loss, new.lm_loss)
        for old, new in paired(run, baseline)
        if old.lm_loss is not None and new.lm_loss is not None
    ]
    if not losses:
        return ""
    tail = losses[-max(1, len(losses) // 10) :]
    difference = fmean(new - old for old, new in tail)
    return (
        f" Over the last {len(tail)} common steps the run's mean loss is {abs(difference):.4f} "
        f"{'above' if difference > 0 else 'below'} the baseline's."
    )
