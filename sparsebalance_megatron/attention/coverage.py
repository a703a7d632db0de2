# SPDX-License-Identifier: Apache-2.0
"""Score coverage: how much of the selector's mass a budget reaches.

Pure functions over curves, whichever selector they come from. Nothing here reads the device from
the host, and every result is the same in a recomputed pass: no atomics.

Shape legend: K budgets, from 1 to the most blocks of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout


def curves_of_mass(mass_SK: Tensor, layout: PackedLayout, *, selecting_heads: int) -> Tensor:
    """Coverage curves of documents.

    Args:
        mass_SK: float64; in column k - 1 the mass that the k-th best block adds, summed over the
            tokens of a document and their selecting heads, each of which has mass 1.
        layout: the documents.
        selecting_heads: heads that were summed over.

    Returns:
        curves_SK: float32 [S, K], the mean mass inside the best k blocks. It never falls with k,
        and is exactly 1 from the document's number of blocks on. A document with mass that is not
        finite has no curve: NaN throughout.
    """
    broken_S1 = ~mass_SK.isfinite().all(1, keepdim=True)
    mean_SK = mass_SK / (layout.tokens_S * selecting_heads)[:, None]
    # A product with a triangle, since CUDA's cumsum is not reproducible; cummax heals rounding.
    curves_SK = (mean_SK @ torch.ones_like(mean_SK[:1]).expand(mean_SK.shape[1], -1).triu()).float()
    budget_K = torch.arange(1, mean_SK.shape[1] + 1, device=curves_SK.device)
    complete_SK = budget_K >= layout.blocks_S[:, None]
    curves_SK = curves_SK.clamp(max=1.0).cummax(1).values.masked_fill(complete_SK, 1.0)
    return curves_SK.masked_fill(broken_S1, torch.nan)


def coverage_at(curves_SK: Tensor, budgets: Tensor) -> Tensor:
    """Look coverage up; budgets outside 1..K read the curve's ends.

    Args:
        curves_SK: [S, K], a selector's coverage.
        budgets: integers [S], or [S, any].

    Returns:
        Coverage in the shape of ``budgets``.
    """
    column = budgets.long().clamp(1, curves_SK.shape[1]) - 1
    if budgets.ndim == 1:
        return curves_SK.gather(1, column[:, None])[:, 0]
    return curves_SK.gather(1, column)
