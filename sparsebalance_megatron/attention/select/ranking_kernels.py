# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Means over blocks, coverage curves and the lengths of lists, in one launch each.

Shape legend: T tokens of the packed sequence, H query heads or KV heads, D head dim, S documents, N
blocks of the queries' sequence, K budgets, Q rows that select, C heads that select.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout

_ROWS = 128


def curves_of_mass(mass_SK: Tensor, layout: PackedLayout, *, selecting_heads: int) -> Tensor:
    """See :func:`...coverage.curves_of_mass`."""
    curves_SK = torch.empty(mass_SK.shape, dtype=torch.float32, device=mass_SK.device)
    with torch.cuda.device_of(mass_SK):
        _curves_kernel[(len(mass_SK),)](
            *(mass_SK, curves_SK, layout.tokens_S, layout.blocks_S),
            *(selecting_heads, mass_SK.shape[1]),
            COLUMNS=triton.next_power_of_2(mass_SK.shape[1]),
        )
    return curves_SK


def counts_of_budgets(
    layouts: LayoutPair, budgets_S: Tensor, *, by_token: bool, heads: int, width: int
) -> Tensor:
    """counts_QC: the blocks that a row sees, or its document's budget, where that is less."""
    query_layout, kv_layout = layouts.query_layout, layouts.kv_layout
    rows = query_layout.tokens if by_token else query_layout.blocks
    counts_QC = torch.empty(rows, heads, dtype=torch.int32, device=budgets_S.device)
    with torch.cuda.device_of(budgets_S):
        _counts_kernel[(triton.cdiv(rows, _ROWS),)](
            *(counts_QC, budgets_S.contiguous(), query_layout.block_T, layouts.own_block_N),
            *(kv_layout.document_N, kv_layout.index_N, rows, width),
            BY_TOKEN=by_token,
            HEADS=heads,
            HEADS_2=triton.next_power_of_2(heads),
            ROWS=_ROWS,
        )
    return counts_QC


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["heads", "columns"])
def _curves_kernel(mass, curves, tokens, blocks, heads, columns, COLUMNS: tl.constexpr):
    """The curve of one document."""
    document, place_K = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    mass_K = tl.load(mass + document * columns + place_K, mask=place_K < columns, other=0.0)
    # Infinity less infinity is no number either.
    broken = tl.max((mass_K - mass_K != 0.0).to(tl.int32), 0) > 0
    mean_K = mass_K / (tl.load(tokens + document) * heads).to(tl.float64)
    curve_K = tl.minimum(tl.cumsum(mean_K, 0).to(tl.float32), 1.0)
    curve_K = tl.associative_scan(curve_K, 0, _greater)
    curve_K = tl.where(place_K + 1 >= tl.load(blocks + document), 1.0, curve_K)
    curve_K = tl.where(broken, float("nan"), curve_K)
    tl.store(curves + document * columns + place_K, curve_K, mask=place_K < columns)


# Budgets are a row of a tensor, and those of some documents: they begin anywhere.
@triton.jit(do_not_specialize=["rows", "width"], do_not_specialize_on_alignment=["budgets"])
def _counts_kernel(
    counts, budgets, token_blocks, own_blocks, documents, indices, rows, width,
    BY_TOKEN: tl.constexpr, HEADS: tl.constexpr, HEADS_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_Q, head_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEADS_2)
    block_Q = row_Q.to(tl.int64)
    if BY_TOKEN:
        block_Q = tl.load(token_blocks + row_Q, mask=row_Q < rows, other=0)
    own_Q = tl.load(own_blocks + block_Q, mask=row_Q < rows, other=0)
    budget_Q = tl.load(budgets + tl.load(documents + own_Q)).to(tl.int32)
    visible_Q = (tl.load(indices + own_Q) + 1).to(tl.int32)
    count_Q = tl.minimum(visible_Q, tl.minimum(tl.maximum(budget_Q, 1), width))
    tl.store(
        counts + row_Q.to(tl.int64)[:, None] * HEADS + head_C[None, :],
        tl.broadcast_to(count_Q[:, None], [ROWS, HEADS_2]),
        mask=(row_Q < rows)[:, None] & (head_C < HEADS)[None, :],
    )


_POOLED_TOKENS = 32


def pooled_means(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """See :func:`..summaries.block_means`, whose means these are to rounding."""
    _, heads, head_dim = x_THD.shape
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    mean_NHD = x_THD.new_empty(layout.blocks, heads, head_dim, dtype=wide)
    with torch.cuda.device_of(x_THD):
        _mean_kernel[layout.blocks, heads](
            x_THD,
            mean_NHD,
            layout.start_N,
            layout.length_N,
            x_THD.stride(0),
            x_THD.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            TOKENS=_POOLED_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return mean_NHD


@triton.jit
def _mean_kernel(
    x_THD, mean_NHD, start_N, length_N, x_stride_T, x_stride_H,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Mean over the tokens of one block, of one head, in the dtype of the means."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, length = tl.load(start_N + block), tl.load(length_N + block).to(tl.int32)
    place_D = tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty)
    for token in range(0, length, TOKENS):
        place_T = token + tl.arange(0, TOKENS)
        x_TD = tl.load(
            x_THD + (begin + place_T)[:, None] * x_stride_T + head * x_stride_H + place_D[None, :],
            mask=(place_T < length)[:, None] & (place_D < HEAD_DIM)[None, :],
            other=0.0,
        )
        sum_D += tl.sum(x_TD.to(mean_NHD.dtype.element_ty), 0)
    tokens_D = tl.zeros([BLOCK_D], mean_NHD.dtype.element_ty) + length
    # Torch's division rounds to nearest; of float32, Triton's own does not.
    if mean_NHD.dtype.element_ty == tl.float32:
        mean_D = tl.div_rn(sum_D, tokens_D)
    else:
        mean_D = sum_D / tokens_D
    row_D = mean_NHD + (block * HEADS + head) * HEAD_DIM + place_D
    tl.store(row_D, mean_D, mask=place_D < HEAD_DIM)
