# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank receives for attention over a packed sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence


def exchange_bytes(
    exchange: str,
    member: int,
    tokens_per_member: Sequence[int],
    inner_members: int | None,
    *,
    kv_heads: int,
    head_dim: int,
    element_bytes: int = 8,
) -> tuple[int, int]:
    """Keys, values and gradients of them that a member receives forward and backward in a layer.

    Pooled keys and coverage, some thousandths of it, are not counted. ``head_dim``: mean of
    keys' and values'. ``inner_members``: ranks of an inner group, for a hierarchical ring; None
    otherwise.
    """
    members, row = len(tokens_per_member), sum(tokens_per_member)
    forward = 2 * kv_heads * head_dim * element_bytes
    gradient = 2 * kv_heads * head_dim * max(element_bytes, 4)
    if exchange == "all-gather":
        padded = (members - 1) * max(tokens_per_member)
        return padded * forward, padded * (forward + gradient)
    others = (row - tokens_per_member[member]) * forward
    inner = inner_members or members
    # The members with the same place in every inner group; a ring of one sends nothing.
    summed_across = sum(tokens_per_member[member % inner :: inner]) if inner < members else 0
    summed_inside = row if inner > 1 else 0
    return others, others + (summed_inside + summed_across) * gradient
