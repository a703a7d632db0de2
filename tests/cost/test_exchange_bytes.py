# SPDX-License-Identifier: Apache-2.0
"""Bytes received in an exchange; tests of context parallelism count what really arrives."""

from __future__ import annotations

import pytest

from sparsebalance_megatron.cost.exchange_bytes import exchange_bytes

ROW = {"kv_heads": 2, "head_dim": 128}
KV_BYTES, GRADIENT_BYTES = 2 * 2 * 128 * 2, 2 * 2 * 128 * 4


def test_all_gather_pads_to_the_longest_share() -> None:
    found = exchange_bytes("all-gather", member=0, tokens_per_member=[100, 90, 80], **ROW)
    assert found.forward_bytes == 200 * KV_BYTES
    assert found.backward_bytes == 200 * (KV_BYTES + GRADIENT_BYTES)


def test_ring_receives_all_but_its_own() -> None:
    found = exchange_bytes("ring", member=1, tokens_per_member=[100, 90, 80], **ROW)
    assert found.forward_bytes == 180 * KV_BYTES
    assert found.backward_bytes == 180 * KV_BYTES + 270 * GRADIENT_BYTES
    assert found.outer_forward_bytes == found.outer_backward_bytes == 0


def test_hierarchical_ring_crosses_between_groups_once_per_member_of_a_group() -> None:
    tokens = [10, 20, 30, 40, 50, 60]
    found = exchange_bytes(
        "hierarchical-ring", member=4, tokens_per_member=tokens, inner_members=2, **ROW
    )
    assert found.forward_bytes == 160 * KV_BYTES
    assert found.outer_forward_bytes == (10 + 30) * KV_BYTES
    assert found.outer_backward_bytes == (10 + 30) * KV_BYTES + (10 + 30 + 50) * GRADIENT_BYTES
    assert found.backward_bytes == 160 * KV_BYTES + (210 + 90) * GRADIENT_BYTES


def test_one_member_receives_nothing() -> None:
    found = exchange_bytes("ring", member=0, tokens_per_member=[100], **ROW)
    assert found.forward_bytes == found.backward_bytes == 0


@pytest.mark.parametrize(
    ("exchange", "member", "inner_members", "message"),
    [
        ("ring", 4, None, "member 4: the group has 0 to 3"),
        ("ring", 0, 2, "others None"),
        ("hierarchical-ring", 0, None, "needs a divisor of the members"),
        ("hierarchical-ring", 0, 3, "needs a divisor of the members"),
        ("hierarchical-ring", 0, 0, "needs a divisor of the members"),
    ],
)
def test_what_does_not_fit_is_refused(
    exchange: str, member: int, inner_members: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_bytes(
            exchange,
            member=member,
            tokens_per_member=[10] * 4,
            inner_members=inner_members,
            **ROW,
        )
