# SPDX-License-Identifier: Apache-2.0
"""Cost of micro-batches that pass the pipeline in segments."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """Costs beside those of the same micro-batches in one piece.

    The defaults are assumptions. A cost table may hold other values under ``segments``.

    Attributes:
        slowness: time of the segments of a sample over its time in one piece, at least 1.
        operation_ms: forward and backward ms that every operation takes beside a micro-batch's
            constant, in a step that runs in segments.
    """

    slowness: float = 1.03
    operation_ms: tuple[float, float] = (0.3, 0.6)

    def __post_init__(self) -> None:
        if not 1.0 <= self.slowness < math.inf:
            raise ValueError(f"segments: slowness {self.slowness}: must be a finite number >= 1")
        if not all(0.0 <= ms < math.inf for ms in self.operation_ms) or len(self.operation_ms) != 2:
            raise ValueError(
                f"segments: operation_ms {self.operation_ms}: must be two finite numbers >= 0"
            )
