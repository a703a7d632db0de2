# SPDX-License-Identifier: Apache-2.0
"""Score coverage: how much of the selector's mass a budget reaches, and the guard over it.

Pure functions over curves, whichever selector they come from. Nothing here reads the device from
the host, and every result is the same in a recomputed pass: no atomics.

Shape legend: S documents, K budgets, from 1 to the most blocks of a document.
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


def guard_budgets(
    curves_SK: Tensor, budgets_S: Tensor, *, base_budget: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """Grow budgets that would lose more coverage than allowed.

    Where C(k) < C(base_budget) - threshold, k becomes the least budget that satisfies the bound.
    The base budget always does, so a budget never grows past it. A document without a curve, whose
    coverage is NaN, keeps its budget.

    Args:
        curves_SK: [S, K], a selector's coverage.
        budgets_S: integers, at least 1; may exceed K.
        base_budget: may exceed K.
        threshold: coverage a document may lose, in [0, 1).

    Returns:
        Budgets in the dtype of ``budgets_S``, and bool [S]: which of them grew.

    Raises:
        ValueError: ``base_budget`` below 1, or ``threshold`` outside [0, 1).
    """
    if base_budget < 1:
        raise ValueError(f"guard_budgets: base_budget {base_budget}: must be at least 1 block")
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"guard_budgets: threshold {threshold}: must lie in [0, 1)")
    base_S = curves_SK[:, min(base_budget, curves_SK.shape[1]) - 1]
    # Subtracting a threshold >= 0 rounds to at most base_S, so the base budget is feasible.
    floor_S = base_S - threshold
    least_S = (curves_SK >= floor_S[:, None]).int().argmax(1).to(budgets_S.dtype) + 1
    short_S = coverage_at(curves_SK, budgets_S) < floor_S
    guarded_S = torch.where(short_S, torch.maximum(least_S, budgets_S), budgets_S)
    return guarded_S, guarded_S > budgets_S
