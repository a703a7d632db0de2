# SPDX-License-Identifier: Apache-2.0
"""The step log's line of coverage curves, written and read.

Shape legend: L layers, U length buckets, K budgets of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.telemetry.jsonl import BadLineError, array, field, whole

COVERAGE = "coverage"
"""Type of the record."""

_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class CoverageRecord:
    """Coverage against budget as it was known after ``iteration``.

    ``grid``: budgets in blocks. ``bucket_blocks``: the largest number of blocks of a document in
    each length bucket. ``curves_LUK``: NaN where nothing was observed.
    """

    iteration: int
    grid: tuple[int, ...]
    bucket_blocks: tuple[int, ...]
    curves_LUK: np.ndarray


def coverage_record(
    *,
    iteration: int,
    grid: tuple[int, ...],
    mean_LUK: np.ndarray,
    observed_LU: np.ndarray,
) -> dict[str, Any]:
    """The coverage curves as they stand; null in place of one that was never observed."""
    buckets = observed_LU.shape[1]
    rounded = np.round(mean_LUK, _DIGITS).tolist()
    return {
        "type": COVERAGE,
        "iteration": iteration,
        "grid": list(grid),
        "bucket_blocks": [min((2 << bucket) - 1, grid[-1]) for bucket in range(buckets)],
        "curves": [
            [curve if known else None for curve, known in zip(layer, seen, strict=True)]
            for layer, seen in zip(rounded, observed_LU.tolist(), strict=True)
        ],
    }


def read_coverage(record: Mapping[str, Any]) -> CoverageRecord:
    """What :func:`coverage_record` wrote.

    Raises:
        BadLineError: naming the value that is missing or is not what it should be.
    """
    grid, bucket_blocks = (array(field(record, key), key) for key in ("grid", "bucket_blocks"))
    try:
        rows = [
            [[None] * grid.size if curve is None else curve for curve in layer]
            for layer in field(record, "curves")
        ]
    except TypeError:
        raise BadLineError("curves is not an array of numbers") from None
    curves_LUK = array(rows, "curves")
    if curves_LUK.shape != (len(rows), bucket_blocks.size, grid.size) or not len(rows):
        raise BadLineError(
            f"curves {curves_LUK.shape} must be [layer][length bucket][budget] with "
            f"{bucket_blocks.size} buckets and {grid.size} budgets"
        )
    if not (np.isfinite(grid).all() and np.isfinite(bucket_blocks).all()):
        raise BadLineError("grid or bucket_blocks holds null")
    return CoverageRecord(
        iteration=whole(record, "iteration"),
        grid=tuple(int(budget) for budget in grid.ravel()),
        bucket_blocks=tuple(int(blocks) for blocks in bucket_blocks.ravel()),
        curves_LUK=curves_LUK,
    )
