# SPDX-License-Identifier: Apache-2.0
"""What planning knows: coverage against budget, and predicted against measured times.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
U length buckets, K budgets of the grid, B budgets up to a document's blocks, 2 forward and
backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebalance_megatron.learn.measurement import DIRECTIONS
from sparsebalance_megatron.report.charts.distributions import blocks_in
from sparsebalance_megatron.report.charts.figure import (
    MUTED,
    PREDICTED,
    RUN,
    Picture,
    absent,
    draw,
)
from sparsebalance_megatron.telemetry.coverage_record import CoverageRecord
from sparsebalance_megatron.telemetry.step_record import MicroBatchTimes, Step

_MOST_PANELS = 6
_MOST_LAYERS_DRAWN = 48
_MOST_POINTS = 2500


def coverage_picture(record: CoverageRecord | None, config: Mapping[str, Any]) -> Picture:
    """Small multiples, one per length bucket, a line per layer."""
    key, title = "coverage", "Coverage against budget"
    if record is None:
        return absent(key, title, "The step log holds no record of coverage curves.")
    observed_U = np.isfinite(record.curves_LUK).all(axis=2).any(axis=0)
    # Of a document with one block every budget covers all.
    buckets = [u for u in np.flatnonzero(observed_U).tolist() if record.bucket_blocks[u] > 1]
    if not buckets:
        return absent(key, title, "No coverage was observed of samples longer than one block.")
    buckets = buckets[-_MOST_PANELS:]
    base, threshold = config.get("base_budget"), config.get("coverage_threshold")
    columns = min(2, len(buckets))
    rows = -(-len(buckets) // columns)

    def paint(figure: Any) -> None:
        axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axis, bucket in zip(axes, buckets, strict=False):
            _paint_bucket(axis, record, bucket, base, threshold)
            axis.set_title(f"{blocks_in(bucket, record.bucket_blocks[bucket])} blocks")
        for axis in axes[len(buckets) :]:
            axis.set_visible(False)
        figure.supxlabel("budget, blocks", fontsize=8.5)
        figure.supylabel("coverage", fontsize=8.5)

    words = (
        f"One frame per length of sample, as known after iteration {record.iteration}: a thin line "
        "per layer, the broad one is their mean. Steep at the left means that few blocks hold most "
        "of the score mass."
    )
    if isinstance(base, int):
        words += " The dotted line is the base budget."
    if isinstance(base, int) and isinstance(threshold, float):
        words += (
            f" The dashed level lies {threshold:g} below the mean's coverage there: where the mean "
            "crosses it is about how far budgets may be cut; the rule holds layer by layer."
        )
    left_out = len(np.flatnonzero(observed_U)) - len(buckets)
    if left_out:
        words += f" Frames of {left_out} shorter lengths are left out."
    return Picture(
        key=key,
        title=title,
        caption=words,
        alt=f"Coverage against budget in {len(buckets)} length buckets of "
        f"{record.curves_LUK.shape[0]} layers.",
        svg=draw(key, paint, height=1.35 * rows + 0.45),
    )


def _paint_bucket(
    axis: Any, record: CoverageRecord, bucket: int, base: Any, threshold: Any
) -> None:
    blocks = record.bucket_blocks[bucket]
    inside = [k for k, budget in enumerate(record.grid) if budget <= blocks]
    budgets = np.array(record.grid)[inside]
    curves_LB = record.curves_LUK[:, bucket, inside]
    curves_LB = curves_LB[np.isfinite(curves_LB).all(axis=1)]
    step = -(-len(curves_LB) // _MOST_LAYERS_DRAWN)
    axis.plot(budgets, curves_LB[::step].T, color=RUN, linewidth=0.5, alpha=0.35)
    mean_B = curves_LB.mean(axis=0)
    axis.plot(budgets, mean_B, color=RUN, linewidth=1.8)
    if isinstance(base, int) and base <= budgets[-1]:
        at_base = float(np.interp(base, budgets, mean_B))
        axis.axvline(base, color=MUTED, linewidth=0.8, linestyle=(0, (1, 1.5)))
        if isinstance(threshold, float):
            axis.axhline(at_base - threshold, color=PREDICTED, linewidth=0.8, linestyle=(0, (4, 2)))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda budget, _: f"{budget:g}")
    axis.minorticks_off()
    axis.set_ylim(0, 1.03)


def scatter_picture(
    times: Mapping[int, MicroBatchTimes], steps: Sequence[Step], sampled: str
) -> Picture:
    """Predicted against measured ms: of micro-batches where they were logged, or else of ranks."""
    key, title = "prediction", "Predicted against measured"
    groups = _micro_batch_pairs(times)
    what = f"a forward or a backward of a micro-batch on one stage, from {sampled}"
    if not groups:
        groups = _rank_pairs(steps)
        what = "a data-parallel rank in a step; predicted times of micro-batches were not logged"
    if not groups:
        return absent(key, title, "No step has both predicted and measured times.")
    everything = np.concatenate([pairs.ravel() for pairs in groups.values()])
    limits = everything.min() / 1.2, everything.max() * 1.2
    errors = {name: float(np.median(np.abs(p / m - 1.0))) for name, (p, m) in groups.items()}

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.plot(limits, limits, color=MUTED, linewidth=0.8)
        for factor in (0.8, 1.25):
            axis.plot(
                limits,
                [factor * each for each in limits],
                color=MUTED,
                linewidth=0.6,
                linestyle=(0, (3, 3)),
            )
        for (name, pairs), colour in zip(groups.items(), (RUN, PREDICTED), strict=False):
            predicted, measured = pairs[:, :: -(-pairs.shape[1] // _MOST_POINTS)]
            axis.scatter(
                measured,
                predicted,
                s=5,
                color=colour,
                alpha=0.45,
                linewidths=0,
                label=f"{name}, median error {errors[name]:.1%}",
            )
        axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
        for side in (axis.xaxis, axis.yaxis):
            _plain_log_ticks(side, limits)
        axis.set_title("predicted, ms")
        axis.set_xlabel("measured, ms")
        axis.legend(frameon=False, fontsize=8, loc="upper left", handletextpad=0.2)

    return Picture(
        key=key,
        title=title,
        caption=f"A point is {what}. On the line the prediction was right, above it too long; "
        "the dashed lines are a factor of 1.25 away. A cloud beside the line is a wrong scale, "
        "which calibration corrects; a broad cloud is what no plan can foresee.",
        alt="Scatter of predicted against measured times; "
        + ", ".join(f"{name}: median error {error:.1%}" for name, error in errors.items())
        + ".",
        svg=draw(key, paint, height=3.9),
    )


def _plain_log_ticks(side: Any, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    decades = np.arange(np.floor(np.log10(limits[0])), np.ceil(np.log10(limits[1])) + 1)
    marks = (1.0, 2.0, 5.0) if len(decades) <= 4 else (1.0,)
    ticks = [factor * 10.0**decade for decade in decades for factor in marks]
    side.set_major_locator(FixedLocator([each for each in ticks if limits[0] <= each <= limits[1]]))
    side.set_major_formatter(lambda ms, _: f"{ms:,.4g}")
    side.set_minor_locator(NullLocator())
    side.set_minor_formatter(NullFormatter())


def _micro_batch_pairs(times: Mapping[int, MicroBatchTimes]) -> dict[str, np.ndarray]:
    """[2, points] of predicted and measured, both positive, by direction."""
    found = [
        np.stack([step.predicted_2RPVM, step.measured_2RPVM]).reshape(2, 2, -1)
        for step in times.values()
        if step.predicted_2RPVM is not None
    ]
    if not found:
        return {}
    joined = np.concatenate(found, axis=2)
    return _usable({name: joined[:, number] for number, name in enumerate(DIRECTIONS)})


def _rank_pairs(steps: Sequence[Step]) -> dict[str, np.ndarray]:
    pairs = [
        pair
        for step in steps
        if step.predicted_rank_ms and step.measured_rank_ms
        for pair in zip(step.predicted_rank_ms, step.measured_rank_ms, strict=True)
    ]
    return _usable({"ranks": np.array(pairs, dtype=np.float64).reshape(-1, 2).T})


def _usable(groups: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    positive = {
        name: pairs[:, (np.nan_to_num(pairs) > 0).all(axis=0)] for name, pairs in groups.items()
    }
    return {name: pairs for name, pairs in positive.items() if pairs.size}
