# SPDX-License-Identifier: Apache-2.0
"""Weights that Megatron keeps in one matrix and Hugging Face in several, and vocabulary padding.

Shape legend: H query heads, G KV heads, D head dim, F MLP columns, W vocabulary rows, X padded
vocabulary rows. Only the first dimension is named: weights [.., hidden] and biases [..] are packed
alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, *, query_groups: int) -> Tensor:
    """Query, key and value projections as Megatron's ``linear_qkv``.

    Megatron's order is by KV head: the query heads that share it, its key head, its value head
    (``SelfAttention.get_query_key_value_tensors``).

    Args:
        q: [H * D, ..], heads of one group next to each other.
        k, v: [G * D, ..].

    Returns:
        [(H + 2 * G) * D, ..].
    """
    by_group = [x.reshape(query_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def unpack_qkv(qkv: Tensor, *, query_groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`pack_qkv`: [H * D, ..], [G * D, ..], [G * D, ..]."""
    by_group = qkv.reshape(query_groups, -1, *qkv.shape[1:])
    query_rows = by_group.shape[1] - 2 * head_dim
    q, k, v = by_group.split([query_rows, head_dim, head_dim], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up projections [F, ..] as Megatron's ``linear_fc1`` [2 * F, ..]: gate first."""
    return torch.cat([gate, up])


def unpack_gate_up(fc1: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_gate_up`."""
    gate, up = fc1.chunk(2)
    return gate, up


def pad_vocabulary(rows: Tensor, padded_rows: int) -> Tensor:
    """[W, ..] -> [X, ..]; the rows added are zero."""
    return torch.cat([rows, rows.new_zeros(padded_rows - rows.shape[0], *rows.shape[1:])])
