# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention over a selection: one operation, several implementations.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, R rows that select,
C heads that select, K width of lists.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsebalance_megatron.attention.selection import (
    Selection,
    check_granularity,
    selecting_heads,
    selecting_rows,
)

Implementation = Literal["auto", "triton", "blocks", "tokens", "flex", "reference"]

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
        selection: which blocks are read, on the same device. The own block, where it is listed,
            comes first; the order of past blocks does not matter. Lists without it are parts, whose
            results :func:`..merge.merge_partials` puts together.
        softmax_scale: factor on q . k.
        implementation: who computes.

            - "triton": kernels, for selections by query block on CUDA; blocks of at least 16
              tokens, a power of two, head dims up to 256, no float64. Deterministic, and without a
              host synchronisation.
            - "blocks": gathered blocks through torch's products; for selections by query block on
              any device.
            - "tokens": gathered tokens through torch's products; for every selection by token.
            - "flex": torch's compiled FlexAttention with a block mask made from the selection, for
              selections by query block on CUDA: a cross-check.
            - "reference": masked dense attention, for every selection, in time quadratic in a
              document's length.
            - "auto": for selections by query block "triton" wherever it serves, else "blocks", with
              a warning on CUDA; for selections by token "tokens".

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
    match _resolve(implementation, q_THD, selection):
        case "triton":
            from sparsebalance_megatron.attention.impl.triton.autograd import attention
        case "blocks":
            from sparsebalance_megatron.attention.impl.blocks import attention
        case "tokens":
            from sparsebalance_megatron.attention.impl.tokens import attention
        case "flex":
            from sparsebalance_megatron.attention.impl.flex import attention
        case "reference":
            from sparsebalance_megatron.attention.impl.reference import attention
    return attention(q_THD, k_TGD, v_TGD, selection, softmax_scale=softmax_scale)


def _resolve(implementation: str, q_THD: Tensor, selection: Selection) -> str:
    if implementation == "auto":
        if selection.granularity != "query-block":
            return "tokens"
        if q_THD.device.type != "cuda":
            return "blocks"
        obstacle = _obstacle("triton", q_THD, selection)
        if obstacle is None:
            return "triton"
        warnings.warn(
            f'block_sparse_attention: "auto" takes "blocks" on CUDA: "triton" {obstacle}',
            stacklevel=3,
        )
        return "blocks"
    if implementation not in get_args(Implementation):
        known = ", ".join(f'"{name}"' for name in get_args(Implementation))
        raise _error(f"implementation {implementation!r}: must be one of {known}")
    obstacle = _obstacle(implementation, q_THD, selection)
    if obstacle is not None:
        raise _error(f'implementation "{implementation}" {obstacle}')
    return implementation


def _obstacle(implementation: str, q_THD: Tensor, selection: Selection) -> str | None:
    """Why an implementation does not serve, with the remedy; None if it does."""
    granularity, block_size = selection.granularity, selection.layout.block_size
    by_query_block = granularity == "query-block"
    if implementation == "tokens" and by_query_block:
        return 'serves selections by token, not by query-block: use "auto"'
    if implementation in ("triton", "blocks", "flex") and not by_query_block:
        return f'serves selections by query-block, not by {granularity}: use "tokens" or "auto"'
    if implementation == "flex" and q_THD.device.type != "cuda":
        return f'needs CUDA, and q lies on {q_THD.device}: use "blocks" or "auto"'
    if implementation == "flex" and selection.layout.slots % 128:
        return (
            f"needs blocks of a multiple of 128 tokens, and those of this row have "
            f'{selection.layout.slots}: use "triton" or "blocks"'
        )
    if implementation != "triton":
        return None
    if q_THD.device.type != "cuda" and not _triton_interprets():
        return f'needs CUDA, and q lies on {q_THD.device}: use "blocks" or "auto"'
    if q_THD.dtype == torch.float64:
        return 'does not compute in float64: use "blocks"'
    if block_size < 16 or block_size & (block_size - 1):
        return f'needs blocks of 16 tokens or more, a power of two, not {block_size}: use "blocks"'
    if q_THD.shape[2] > 256:
        return f'serves head dims up to 256, not {q_THD.shape[2]}: use "blocks"'
    return None


def _triton_interprets() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


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
