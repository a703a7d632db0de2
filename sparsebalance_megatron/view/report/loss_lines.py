# SPDX-License-Identifier: Apache-2.0
"""Loss over iterations: a panel of both runs, and one of their difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.log.records import StepRecord

LINES_WIDTH, LINES_HEIGHT = 330.0, 90.0
_MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class LinePanel:
    """Lines in units of the panel, by their names; ``y`` runs downwards.

    ``y_ticks``, ``x_ticks``: place and text. ``zero_y``: where the value 0 is, if in the panel.
    """

    title: str
    lines: Mapping[str, str]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    zero_y: float | None


def loss_panels(run: Sequence[StepRecord], baseline: Sequence[StepRecord]) -> tuple[LinePanel, ...]:
    """Loss of every step, and the run's less the baseline's; none for fewer than two steps."""
    losses = [
        {step.iteration: step.lm_loss for step in steps if step.lm_loss is not None}
        for steps in (baseline, run)
    ]
    shared = sorted(losses[0].keys() & losses[1].keys())
    difference = {each: losses[1][each] - losses[0][each] for each in shared}
    known = dict(zip(("baseline", "this run"), losses, strict=True))
    both = {name: values for name, values in known.items() if len(values) > 1}
    panels = [_panel("loss", both)] if both else []
    if len(shared) > 1:
        panels.append(_panel("this run's loss less the baseline's", {"difference": difference}))
    return tuple(panels)


def _panel(title: str, series: Mapping[str, Mapping[int, float]]) -> LinePanel:
    values = [value for each in series.values() for value in each.values()]
    numbers = [number for each in series.values() for number in each]
    (low, high), (first, last) = ((min(each), max(each)) for each in (values, numbers))
    if low == high:
        low, high = low - 1e-3, high + 1e-3
    span = high - low

    def at(number: float, value: float) -> tuple[float, float]:
        x = LINES_WIDTH * (number - first) / (last - first)
        return x, LINES_HEIGHT * (high - value) / span

    lines = {}
    for name, each in series.items():
        taken = np.linspace(0, len(each) - 1, min(len(each), _MOST_POINTS)).round().astype(int)
        points = [at(*list(each.items())[place]) for place in taken]
        lines[name] = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return LinePanel(
        title=title,
        lines=lines,
        y_ticks=tuple((at(first, value)[1], f"{value:.3g}") for value in (low, high)),
        x_ticks=tuple((at(number, low)[0], str(number)) for number in (first, last)),
        zero_y=at(first, 0.0)[1] if low < 0.0 < high else None,
    )
