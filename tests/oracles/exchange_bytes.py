# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank receives for attention over a packed sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsebalance_megatron.config import ExchangeName


@dataclass(frozen=True, kw_only=True)
class ExchangeBytes:
    """What one member receives in one layer.

    Attributes:
        forward_bytes, backward_bytes: through all links.
        outer_forward_bytes, outer_backward_bytes: those of them that a hierarchical ring sends
            between its inner groups; 0 otherwise.
    """

    forward_bytes: int
    backward_bytes: int
    outer_forward_bytes: int = 0
    outer_backward_bytes: int = 0


def exchange_bytes(
    exchange: ExchangeName,
    *,
    member: int,
    tokens_per_member: Sequence[int],
    kv_heads: int,
    head_dim: int,
    element_bytes: int = 2,
    inner_members: int | None = None,
) -> ExchangeBytes:
    """Count the bytes of keys, values and their gradients that a member receives in one layer.

    Pooled keys and coverage, some thousandths of it, are not counted.

    ``head_dim``: mean of keys' and values'. ``inner_members``: ranks of an inner
    group, for a hierarchical ring; None otherwise.
    """
    members = len(tokens_per_member)
    if members == 1:
        return ExchangeBytes(forward_bytes=0, backward_bytes=0)
    elements = 2 * kv_heads * head_dim
    forward = elements * element_bytes
    gradient = elements * max(element_bytes, 4)
    if exchange == "all-gather":
        padded = (members - 1) * max(tokens_per_member)
        return ExchangeBytes(
            forward_bytes=padded * forward, backward_bytes=padded * (forward + gradient)
        )
    row, own = sum(tokens_per_member), tokens_per_member[member]
    others = (row - own) * forward
    inner = inner_members or members
    # The members with the same place in every inner group; a ring of one sends nothing.
    across = sum(tokens_per_member[member % inner :: inner]) if inner < members else own
    summed_inside = row if inner > 1 else 0
    summed_across = across if inner < members else 0
    return ExchangeBytes(
        forward_bytes=others,
        backward_bytes=others + (summed_inside + summed_across) * gradient,
        outer_forward_bytes=(across - own) * forward,
        outer_backward_bytes=(across - own) * forward + summed_across * gradient,
    )
