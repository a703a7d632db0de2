# SPDX-License-Identifier: Apache-2.0
"""Fused matrices: the order of their rows, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.convert import linear_fc1_rows, linear_qkv_rows

from sparsebalance_megatron.convert.fused_weights import (
    pack_gate_up,
    pack_qkv,
    pad_vocabulary,
    unpack_gate_up,
    unpack_qkv,
)

SIZES = st.integers(1, 5)


def numbered(rows: int, start: int, columns: int | None) -> torch.Tensor:
    """Every row holds its own number; a vector where there are no columns."""
    numbers = torch.arange(start, start + rows, dtype=torch.float32)
    return numbers if columns is None else numbers[:, None].expand(-1, columns).contiguous()


@pytest.mark.parametrize("columns", [None, 3])
@given(groups=SIZES, heads_per_group=SIZES, head_dim=SIZES)
def test_qkv(columns: int | None, groups: int, heads_per_group: int, head_dim: int) -> None:
    q_rows, kv_rows = groups * heads_per_group * head_dim, groups * head_dim
    q = numbered(q_rows, 0, columns)
    k = numbered(kv_rows, 1000, columns)
    v = numbered(kv_rows, 2000, columns)
    packed = pack_qkv(q, k, v, query_groups=groups)
    expected = linear_qkv_rows(q.tolist(), k.tolist(), v.tolist(), groups=groups, head_dim=head_dim)
    assert packed.tolist() == expected
    for back, source in zip(
        unpack_qkv(packed, query_groups=groups, head_dim=head_dim), (q, k, v), strict=True
    ):
        assert torch.equal(back, source)


@given(rows=SIZES, columns=SIZES)
def test_gate_up(rows: int, columns: int) -> None:
    gate, up = numbered(rows, 0, columns), numbered(rows, 1000, columns)
    packed = pack_gate_up(gate, up)
    assert packed.tolist() == linear_fc1_rows(gate.tolist(), up.tolist())
    back = unpack_gate_up(packed)
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)


@given(rows=SIZES, padding=st.integers(0, 4))
def test_vocabulary_padding_is_zero(rows: int, padding: int) -> None:
    source = numbered(rows, 1, 2)
    padded = pad_vocabulary(source, rows + padding)
    assert torch.equal(padded[:rows], source)
    assert padded[rows:].tolist() == [[0.0, 0.0]] * padding
