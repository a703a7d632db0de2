# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: from the baseline's step to this run's, and rank by rank.

Shape legend: R data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.report.charts.figure import (
    BASELINE,
    FAINT,
    INK,
    MUTED,
    PREDICTED,
    RUN,
    Picture,
    absent,
    draw,
)
from sparsebalance_megatron.report.explanation import Explanation
from sparsebalance_megatron.telemetry.step_record import MicroBatchTimes, Step

_MOST_RANKS = 32
_BAR = 0.62


def waterfall_picture(explanation: Explanation) -> Picture:
    """The baseline's mean step, what was taken away and added, this run's mean step."""
    changes = explanation.changes
    before, after = explanation.baseline.step_ms, explanation.run.step_ms
    names = ["baseline", *(change.name for change in changes), "this run"]
    bottoms, heights, colours = [0.0], [before], [BASELINE]
    level = before
    for change in changes:
        bottoms.append(min(level, level + change.ms))
        heights.append(abs(change.ms))
        colours.append(RUN if change.ms <= 0.0 else PREDICTED)
        level += change.ms
    bottoms, heights, colours = [*bottoms, 0.0], [*heights, after], [*colours, RUN]
    texts = [f"{before:,.0f}", *(change.signed for change in changes), f"{after:,.0f}"]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        rows = np.arange(len(names))
        axis.barh(rows, heights, left=bottoms, height=_BAR, color=colours)
        for row, bottom, height, text in zip(rows, bottoms, heights, texts, strict=True):
            axis.annotate(
                text,
                (bottom + height, row),
                xytext=(3, 0),
                textcoords="offset points",
                va="center_baseline",
                color=INK,
            )
        axis.set_yticks(rows, names)
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlim(0, 1.14 * max(b + h for b, h in zip(bottoms, heights, strict=True)))
        axis.set_xlabel("ms of the mean step")

    spoken = ", ".join(f"{name} {text} ms" for name, text in zip(names, texts, strict=True))
    return Picture(
        key="waterfall",
        title="Why the step takes as long as it does",
        caption="From the baseline's mean step to this run's, over the steps that both took. Less "
        "attention is the predicted share of the baseline's computing; the machine is what equal "
        "work took longer or shorter, prediction errors included; waiting, the rest and both steps "
        "are measured.",
        alt=f"Waterfall: {spoken}.",
        svg=draw("waterfall", paint, height=2.3),
    )


def ranks_picture(
    times: Mapping[int, MicroBatchTimes], steps: Sequence[Step], sampled: str
) -> Picture:
    """Bars of computing, waiting and the rest, one per data-parallel rank.

    Args:
        times: of micro-batches, by iteration.
        sampled: how many steps these are, in words.
    """
    key, title = "ranks", "Where the time of every rank goes"
    known = {
        step.iteration: step
        for step in steps
        if step.iteration in times and step.complete and step.iteration_ms and step.schedule_ms
    }
    if not known:
        return absent(key, title, "No step has measured times of all micro-batches.")
    compute_R = np.mean(
        [stage_busy_ms(times[each].measured_2RPVM).mean(axis=1) for each in known], axis=0
    )
    schedule_ms = float(np.mean([step.schedule_ms or 0.0 for step in known.values()]))
    step_ms = float(np.mean([step.iteration_ms or 0.0 for step in known.values()]))
    shown = _evenly_by_time(compute_R)
    waiting_R = np.maximum(schedule_ms - compute_R, 0.0)
    rest_ms = max(step_ms - schedule_ms, 0.0)

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        rows = np.arange(len(shown))
        left = np.zeros(len(shown))
        parts = (
            ("computing", compute_R[shown], RUN),
            ("waiting", waiting_R[shown], PREDICTED),
            ("rest of the step", np.full(len(shown), rest_ms), FAINT),
        )
        for name, values, colour in parts:
            axis.barh(rows, values, left=left, height=_BAR, color=colour, label=name)
            left = left + values
        axis.set_yticks(rows, [f"rank {rank}" for rank in shown])
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("ms of the mean step")
        figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=MUTED)

    waits = waiting_R / step_ms
    return Picture(
        key=key,
        title=title,
        caption=f"The mean of {sampled}. Computing is the mean over a rank's pipeline stages; "
        "waiting is the rest of the time until the slowest rank's last backward; the rest of the "
        "step is everything after it: gradients, optimizer, reading."
        + (
            f" {len(shown)} of {len(compute_R)} ranks are drawn, from the busiest to the idlest."
            if len(shown) < len(compute_R)
            else ""
        ),
        alt=f"Bars of {len(shown)} ranks: they wait {waits.min():.0%} to {waits.max():.0%} of the "
        "step.",
        svg=draw(key, paint, height=min(0.9 + 0.24 * len(shown), 6.0)),
    )


def _evenly_by_time(compute_R: np.ndarray) -> np.ndarray:
    """All ranks in order, or some of them from the busiest to the idlest."""
    if len(compute_R) <= _MOST_RANKS:
        return np.arange(len(compute_R))
    by_time = np.argsort(-compute_R, kind="stable")
    return by_time[np.linspace(0, len(by_time) - 1, _MOST_RANKS).round().astype(int)]
