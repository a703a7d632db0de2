# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention over a selection: one operation, several implementations.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, R rows that select,
C heads that select, K width of lists.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparsebalance_megatron.attention.selection import (
    Selection,
    check_granularity,
    selecting_heads,
    selecting_rows,
)

Implementation = Literal["auto", "blocks", "reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def block_sparse_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of every query over its selected KV blocks.

    Tokens of a selected past block are all read; of the query's own block, those up to itself.
    Differentiable in q, k and v through the output; the selection gets no gradient, as in MoBA.

    Args:
        q_THD: queries; H is a multiple of G, query head h reads KV head h // (H / G).
        k_TGD, v_TGD: keys and values, same dtype and device.
        selection: which blocks are read, on the same device. "blocks" relies on the own block
            coming first in each list.
        softmax_scale: factor on q . k.
        implementation: "blocks" computes the selected block pairs only, for selections by query
            block; "reference" masks dense attention, for every selection, in time quadratic in a
            document's length. "auto" takes "blocks" for selections by query block and "reference"
            for those by token, on the CPU and on CUDA alike.

    Returns:
        out_THD in the inputs' dtype, and lse_TH: natural log-sum-exp of the scaled scores read,
        float32 (float64 for float64 inputs), not differentiable. A query with an empty list has
        out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the implementation does not serve the
            selection. An explicit choice never falls back.
    """
    _check_tensors(q_THD, k_TGD, v_TGD, selection)
    _check_selection(q_THD, k_TGD, selection)
    match _resolve(implementation, selection):
        case "blocks":
            from sparsebalance_megatron.attention.impl.blocks import attention
        case "reference":
            from sparsebalance_megatron.attention.impl.reference import attention
    return attention(q_THD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale)


def _resolve(implementation: str, selection: Selection) -> Literal["blocks", "reference"]:
    by_query_block = selection.granularity == "query-block"
    match implementation:
        case "auto":
            return "blocks" if by_query_block else "reference"
        case "blocks" if not by_query_block:
            raise _error(
                f'implementation "blocks" serves selections by query-block, not by '
                f'{selection.granularity}: use "reference" or "auto"'
            )
        case "blocks" | "reference":
            return implementation
    raise _error(f'implementation {implementation!r}: must be "auto", "blocks" or "reference"')


def _check_tensors(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (q_THD, k_TGD, v_TGD))
    if q_THD.ndim != 3 or k_TGD.ndim != 3:
        raise _error(f"q, k, v have shapes {shapes}: must be [tokens, heads, head dim]")
    if k_TGD.shape != v_TGD.shape or q_THD.shape[2] != k_TGD.shape[2]:
        raise _error(f"q, k, v have shapes {shapes}: k and v must agree, and q in the head dim")
    if q_THD.shape[0] != k_TGD.shape[0] or q_THD.shape[0] != selection.layout.tokens:
        raise _error(
            f"q, k, v have shapes {shapes}: all must have the {selection.layout.tokens} tokens of "
            "the selection's layout"
        )
    if k_TGD.shape[1] == 0 or q_THD.shape[1] % k_TGD.shape[1]:
        raise _error(f"{q_THD.shape[1]} query heads are no multiple of {k_TGD.shape[1]} KV heads")
    if not q_THD.dtype == k_TGD.dtype == v_TGD.dtype or q_THD.dtype not in _DTYPES:
        raise _error(
            f"q, k, v have dtypes {q_THD.dtype}, {k_TGD.dtype}, {v_TGD.dtype}: must share one of "
            "float16, bfloat16, float32, float64"
        )
    devices = {x.device for x in (q_THD, k_TGD, v_TGD, selection.indices_RCK, selection.counts_RC)}
    if len(devices) > 1:
        raise _error(
            f"q, k, v and the selection lie on {sorted(map(str, devices))}: must share one"
        )


def _check_selection(q_THD: Tensor, k_TGD: Tensor, selection: Selection) -> None:
    check_granularity(selection.granularity)
    expected = (
        selecting_rows(selection.granularity, selection.layout),
        selecting_heads(selection.granularity, q_THD.shape[1], k_TGD.shape[1]),
    )
    indices, counts = selection.indices_RCK, selection.counts_RC
    if indices.shape[:-1] != expected or counts.shape != expected:
        raise _error(
            f"selection by {selection.granularity} has lists {tuple(indices.shape)} and counts "
            f"{tuple(counts.shape)}: must be [{expected[0]} rows, {expected[1]} heads, width] and "
            "the same without width; select with these queries, keys and layout"
        )


def _error(message: str) -> ValueError:
    return ValueError(f"block_sparse_attention: {message}")
