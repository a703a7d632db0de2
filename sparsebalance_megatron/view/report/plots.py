# SPDX-License-Identifier: Apache-2.0
"""Line plots of a report: coverage against budget, loss over iterations.

Shape legend: U length buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.log.records import CoverageRecord, StepRecord

_MOST_FRAMES = 6
_MOST_BUDGETS_NAMED = 5
_MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines in units of the plot, by their names; ``y`` runs downwards.

    ``band``: outline of the area around them. ``x_ticks``, ``y_ticks``: place and text.
    ``dotted_x``, ``dashed_y``: places of lines across.
    """

    title: str
    width: float
    height: float
    lines: Mapping[str, str]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    band: str = ""
    dotted_x: float | None = None
    dashed_y: float | None = None

    @property
    def label_width(self) -> float:
        return 8.0 + 6.1 * max(len(text) for _, text in self.y_ticks)


def coverage_plots(record: CoverageRecord | None, config: Mapping[str, Any]) -> tuple[Plot, ...]:
    """A plot per length of the longest samples; none where no coverage was observed."""
    if record is None:
        return ()
    observed_U = np.isfinite(record.curves_LUK).all(axis=2).any(axis=0)
    # Every budget covers the whole of a document with one block.
    buckets = [u for u in np.flatnonzero(observed_U).tolist() if record.bucket_blocks[u] > 1]
    return tuple(_coverage_plot(record, bucket, config) for bucket in buckets[-_MOST_FRAMES:])


def _coverage_plot(record: CoverageRecord, bucket: int, config: Mapping[str, Any]) -> Plot:
    """The layers' band, their mean and the base budget."""
    width, height, blocks = 180.0, 100.0, record.bucket_blocks[bucket]
    budgets_K = np.array([budget for budget in record.grid if budget <= blocks])
    curves_LK = record.curves_LUK[:, bucket, : len(budgets_K)]
    curves_LK = curves_LK[np.isfinite(curves_LK).all(axis=1)]
    mean_K = curves_LK.mean(axis=0)
    x_K = width * np.log2(budgets_K) / np.log2(max(float(budgets_K[-1]), 2.0))
    lowest, mean, highest = (
        _points(x_K, height * (1.0 - each_K))
        for each_K in (curves_LK.min(axis=0), mean_K, curves_LK.max(axis=0))
    )
    base, base_x = config.get("base_budget"), None
    alike = config.get("layer_budgets") is None
    if alike and isinstance(base, int) and 1 <= base <= budgets_K[-1]:
        base_x = float(np.interp(np.log2(base), np.log2(budgets_K), x_K))
    every = -(-len(budgets_K) // _MOST_BUDGETS_NAMED)
    least = 1 << bucket
    return Plot(
        title=f"{blocks} blocks" if least >= blocks else f"{least} to {blocks} blocks",
        width=width,
        height=height,
        lines={"mean of the layers": " ".join(mean)},
        band=" ".join([*highest, *reversed(lowest)]),
        x_ticks=list(zip(x_K.tolist(), map(str, budgets_K), strict=True))[::every],
        y_ticks=[(height * (1.0 - share), f"{share:g}") for share in (0.0, 0.5, 1.0)],
        dotted_x=base_x,
    )


def loss_plots(run: Sequence[StepRecord], baseline: Sequence[StepRecord]) -> tuple[Plot, ...]:
    """Loss of every step, and the run's less the baseline's; none for fewer than two steps."""
    known = {
        name: {step.iteration: step.lm_loss for step in steps if step.lm_loss is not None}
        for name, steps in (("baseline", baseline), ("this run", run))
    }
    before, after = known.values()
    difference = {each: after[each] - before[each] for each in sorted(before.keys() & after.keys())}
    plots = {
        "loss": {name: values for name, values in known.items() if len(values) > 1},
        "this run's loss less the baseline's": {"difference": difference} if difference else {},
    }
    return tuple(
        _loss_plot(title, series)
        for title, series in plots.items()
        if any(len(values) > 1 for values in series.values())
    )


def _loss_plot(title: str, series: Mapping[str, Mapping[int, float]]) -> Plot:
    width, height = 330.0, 90.0
    values = [value for each in series.values() for value in each.values()]
    numbers = [number for each in series.values() for number in each]
    (low, high), (first, last) = ((min(each), max(each)) for each in (values, numbers))
    if low == high:
        low, high = low - 1e-3, high + 1e-3

    def y(value: Any) -> Any:
        return height * (high - value) / (high - low)

    lines = {}
    for name, each in series.items():
        taken = np.linspace(0, len(each) - 1, min(len(each), _MOST_POINTS)).round().astype(int)
        numbers_N, values_N = (np.array([*part])[taken] for part in (each, each.values()))
        x_N = width * (numbers_N - first) / (last - first)
        lines[name] = " ".join(_points(x_N, y(values_N)))
    return Plot(
        title=title,
        width=width,
        height=height,
        lines=lines,
        x_ticks=[(0.0, str(first)), (width, str(last))],
        y_ticks=[(y(value), _shown(value)) for value in (low, high)],
        dashed_y=y(0.0) if low < 0.0 < high else None,
    )


def _shown(value: float) -> str:
    """Three digits, without an exponent."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def _points(x: np.ndarray, y: np.ndarray) -> list[str]:
    return [f"{each_x:.1f},{each_y:.1f}" for each_x, each_y in zip(x, y, strict=True)]
