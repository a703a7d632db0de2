# SPDX-License-Identifier: Apache-2.0
"""Coverage against budget, one small frame per length of sample.

Shape legend: L layers, U length buckets, K budgets of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.log.records import CoverageRecord

_MOST_FRAMES = 6
FRAME_WIDTH, FRAME_HEIGHT = 180.0, 100.0


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Curves of one length bucket, in units of the frame; ``y`` runs downwards.

    ``band``: outline of what lies between the lowest and the highest layer. ``line``: their mean.
    ``base_x``: the base budget, where all layers have one. ``least_y``: the coverage that a sample
    must keep.
    """

    title: str
    band: str
    line: str
    ticks: tuple[tuple[float, int], ...]
    base_x: float | None
    least_y: float | None


def coverage_frames(record: CoverageRecord | None, config: Mapping[str, Any]) -> tuple[Frame, ...]:
    """The frames of the longest samples; none where no coverage was observed."""
    if record is None:
        return ()
    observed_U = np.isfinite(record.curves_LUK).all(axis=2).any(axis=0)
    # Every budget covers the whole of a document with one block.
    buckets = [u for u in np.flatnonzero(observed_U).tolist() if record.bucket_blocks[u] > 1]
    return tuple(_frame(record, bucket, config) for bucket in buckets[-_MOST_FRAMES:])


def _frame(record: CoverageRecord, bucket: int, config: Mapping[str, Any]) -> Frame:
    blocks = record.bucket_blocks[bucket]
    inside = [k for k, budget in enumerate(record.grid) if budget <= blocks]
    budgets_K = np.array(record.grid)[inside]
    curves_LK = record.curves_LUK[:, bucket, inside]
    curves_LK = curves_LK[np.isfinite(curves_LK).all(axis=1)]
    mean_K = curves_LK.mean(axis=0)
    largest = np.log2(max(float(budgets_K[-1]), 2.0))
    x_K = FRAME_WIDTH * np.log2(budgets_K) / largest
    low, high = (_points(x_K, limit(curves_LK, axis=0)) for limit in (np.min, np.max))
    base, threshold = config.get("base_budget"), config.get("coverage_threshold")
    base_x = least_y = None
    alike = config.get("layer_budgets") is None
    if alike and isinstance(base, int) and 1 <= base <= budgets_K[-1]:
        base_x = float(FRAME_WIDTH * np.log2(base) / largest)
        if isinstance(threshold, float):
            at_base = float(np.interp(base, budgets_K, mean_K))
            least_y = FRAME_HEIGHT * (1.0 - at_base + threshold)
    every = -(-len(budgets_K) // 5)
    least = 1 << bucket
    return Frame(
        title=f"{blocks} blocks" if least >= blocks else f"{least} to {blocks} blocks",
        band=" ".join([*high, *reversed(low)]),
        line=" ".join(_points(x_K, mean_K)),
        ticks=tuple(
            (float(x), int(budget)) for x, budget in list(zip(x_K, budgets_K, strict=True))[::every]
        ),
        base_x=base_x,
        least_y=least_y,
    )


def _points(x_K: np.ndarray, coverage_K: np.ndarray) -> list[str]:
    return [f"{x:.1f},{FRAME_HEIGHT * (1.0 - y):.1f}" for x, y in zip(x_K, coverage_K, strict=True)]
