# SPDX-License-Identifier: Apache-2.0
"""Plots of coverage against budget.

Shape legend: L layers, U length buckets, K budgets of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.log.records import CoverageRecord

_MOST_FRAMES = 6
_MOST_BUDGETS_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class CoveragePlot:
    """Coverage, from 1 at the top to 0 at ``height``, over budgets.

    ``mean``: points of the layers' mean. ``band``: outline of the area of all layers. ``x_ticks``:
    place and text. ``dotted_x``, ``dashed_y``: places of lines across.
    """

    title: str
    mean: str
    band: str
    x_ticks: Sequence[tuple[float, str]]
    dotted_x: float | None
    dashed_y: float | None
    width: float = 180.0
    height: float = 100.0


def coverage_plots(
    record: CoverageRecord | None, config: Mapping[str, Any]
) -> tuple[CoveragePlot, ...]:
    """A plot per length of the longest samples; none where no coverage was observed."""
    if record is None:
        return ()
    observed_U = np.isfinite(record.curves_LUK).all(axis=2).any(axis=0)
    # Every budget covers the whole of a document with one block.
    buckets = [u for u in np.flatnonzero(observed_U).tolist() if record.bucket_blocks[u] > 1]
    return tuple(_coverage_plot(record, bucket, config) for bucket in buckets[-_MOST_FRAMES:])


def _coverage_plot(record: CoverageRecord, bucket: int, config: Mapping[str, Any]) -> CoveragePlot:
    """The layers' band, their mean, the base budget and the coverage that samples must keep."""
    width, height = CoveragePlot.width, CoveragePlot.height
    blocks = record.bucket_blocks[bucket]
    budgets_K = np.array([budget for budget in record.grid if budget <= blocks])
    curves_LK = record.curves_LUK[:, bucket, : len(budgets_K)]
    curves_LK = curves_LK[np.isfinite(curves_LK).all(axis=1)]
    mean_K = curves_LK.mean(axis=0)
    x_K = width * np.log2(budgets_K) / np.log2(max(float(budgets_K[-1]), 2.0))
    lowest, mean, highest = (
        _points(x_K, height * (1.0 - each_K))
        for each_K in (curves_LK.min(axis=0), mean_K, curves_LK.max(axis=0))
    )
    base, threshold = config.get("base_budget"), config.get("coverage_threshold")
    base_x = least_y = None
    alike = config.get("layer_budgets") is None
    if alike and isinstance(base, int) and 1 <= base <= budgets_K[-1]:
        base_x = float(np.interp(np.log2(base), np.log2(budgets_K), x_K))
        if isinstance(threshold, float):
            least_y = height * (1.0 - float(np.interp(base, budgets_K, mean_K)) + threshold)
    every = -(-len(budgets_K) // _MOST_BUDGETS_NAMED)
    least = 1 << bucket
    return CoveragePlot(
        title=f"{blocks} blocks" if least >= blocks else f"{least} to {blocks} blocks",
        mean=" ".join(mean),
        band=" ".join([*highest, *reversed(lowest)]),
        x_ticks=list(zip(x_K.tolist(), map(str, budgets_K), strict=True))[::every],
        dotted_x=base_x,
        dashed_y=least_y,
    )


def _points(x: np.ndarray, y: np.ndarray) -> list[str]:
    return [f"{each_x:.1f},{each_y:.1f}" for each_x, each_y in zip(x, y, strict=True)]
