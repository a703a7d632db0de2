# SPDX-License-Identifier: Apache-2.0
"""Cost of micro-batches that pass the pipeline in segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

OperationMs = Annotated[float, Meta(ge=0.0, le=1e7)]


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """Costs beside those of the same micro-batches in one piece.

    The defaults are assumptions. A cost table may hold other values under ``segments``.

    Attributes:
        slowness: time of the segments of a sample over its time in one piece, at least 1.
        operation_ms: forward and backward ms that every operation takes beside a micro-batch's
            constant, in a step that runs in segments.
    """

    slowness: Annotated[float, Meta(ge=1.0, le=1e3)] = 1.03
    operation_ms: tuple[OperationMs, OperationMs] = (0.3, 0.6)
