# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that are timed apart, and the two directions they run in."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    """A part of the model; the first three are per transformer layer.

    ``LINEAR`` is the rest of a layer: norms, projections, rotary embedding, MLP, residuals.
    ``HEAD`` is the final norm, the vocabulary projection and the loss.
    """

    ATTENTION = "attention"
    ROUTER = "router"
    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"


class Direction(StrEnum):
    """A pass through a part of the model."""

    FORWARD = "forward"
    BACKWARD = "backward"


NEVER_TIMED = frozenset({(Part.ROUTER, Direction.BACKWARD)})
"""Selection carries no gradient, so a table without these rows is complete and their cost is 0."""
