# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Coverage curves and the lengths of lists in one launch each, where Triton ranked.

Shape legend: S documents, N blocks of the queries' sequence, K budgets, Q rows that select, C heads
that select.
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


@triton.jit(do_not_specialize=["rows", "width"])
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
