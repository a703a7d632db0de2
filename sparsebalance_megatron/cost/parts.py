# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that are timed apart, and the two directions they run in."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from msgspec import Meta


class Part(StrEnum):
    """A part of the model; the first five are per transformer layer.

    ``DENSE_ATTENTION`` is of documents that a layer attends to densely, in place of ``ATTENTION``
    and ``ROUTER``. ``LINEAR`` is the rest of a layer: norms, projections, rotary embedding, MLP,
    residuals. ``EXPERTS`` is what routed experts take, with the exchange of tokens. Shared experts
    are counted with the linear part, and measured with the routed ones. ``HEAD`` is the final norm,
    the vocabulary projection and the loss.
    """

    ATTENTION = "attention"
    DENSE_ATTENTION = "dense_attention"
    ROUTER = "router"
    LINEAR = "linear"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"


class Direction(StrEnum):
    """A pass through the model or a part of it, in the order of an axis of two."""

    FORWARD = "forward"
    BACKWARD = "backward"


NEVER_TIMED = frozenset({(Part.ROUTER, Direction.BACKWARD)})
"""Selection carries no gradient, so a table without these rows is complete and their cost is 0."""
OF_EVERY_MODEL = tuple(part for part in Part if part is not Part.EXPERTS)
"""Parts that every table has times of; of experts only where the model has them."""


OperationMs = Annotated[float, Meta(ge=0.0, le=1e7)]


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """Costs beside those of the same micro-batches in one piece.

    The defaults are assumptions. A cost table may hold other values under ``segments``.

    Attributes:
        slowness: time of the segments of a sample over its time in one piece, at least 1.
        operation_ms: forward and backward ms that every operation takes beside a micro-batch's
            constant, in a step that runs in segments.
        dense_slowness: of dense attention besides, where in one piece the model's own runs; of
            documents whose keys and values are gathered, too.
    """

    slowness: Annotated[float, Meta(ge=1.0, le=1e3)] = 1.03
    operation_ms: tuple[OperationMs, OperationMs] = (0.3, 0.6)
    dense_slowness: Annotated[float, Meta(ge=1.0, le=1e3)] = 1.0

    def times(self, factor: float) -> "SegmentCost":
        """These costs where segments take ``factor`` times as long, at least as long as one
        piece."""
        return replace(self, slowness=max(1.0, factor * self.slowness))
