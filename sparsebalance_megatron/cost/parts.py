# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that are timed apart, and the two directions they run in."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    """A part of the model; the first five are per transformer layer.

    ``DENSE_ATTENTION`` is in dense layers, in place of ``ATTENTION`` and ``ROUTER``. ``LINEAR`` is
    the rest of a layer: norms, projections, rotary embedding, MLP, shared experts, residuals; where
    it was measured, routed experts too. ``EXPERTS`` is what routed experts take, with the exchange
    of tokens: a rank of an expert-parallel group takes it for the mean tokens of the group's ranks.
    ``HEAD`` is the final norm, the vocabulary projection and the loss.
    """

    ATTENTION = "attention"
    DENSE_ATTENTION = "dense_attention"
    ROUTER = "router"
    LINEAR = "linear"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"


class Direction(StrEnum):
    """A pass through a part of the model."""

    FORWARD = "forward"
    BACKWARD = "backward"


NEVER_TIMED = frozenset({(Part.ROUTER, Direction.BACKWARD)})
"""Selection carries no gradient, so a table without these rows is complete and their cost is 0."""
TIMED = tuple(part for part in Part if part is not Part.EXPERTS)
"""Parts that are measured; experts are timed within the linear part."""
OF_EVERY_MODEL = tuple(part for part in TIMED if part is not Part.DENSE_ATTENTION)
"""Parts whose costs are always known; those of dense layers only where they were measured, and
those of experts only where they were counted."""
