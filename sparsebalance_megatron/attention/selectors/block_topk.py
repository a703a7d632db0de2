# SPDX-License-Identifier: Apache-2.0
"""MoBA's parameter-free router: scores, coverage, the coverage guard, and selection.

Nothing here reads the device from the host, so budgets may differ in every call at no cost.
Every result is the same in a recomputed pass: no atomics, no unstable sort.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, S documents,
N blocks of the row, B slots of a block, J block number inside a document (as a size: the most
blocks of any document), K budgets 1..J or width of lists, R rows that select, C heads that select.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import (
    Granularity,
    Selection,
    check_granularity,
    selecting_heads,
)

_CHUNK_ELEMENTS = 1 << 26
"""Elements of a temporary [R, heads, J]: 256 MiB in float32."""
_PRODUCT_ELEMENTS = 1 << 19
"""Elements of a product [heads, R, N]: many heads if rows are blocks, one if they are tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterScores:
    """Scores of the blocks of each row's own document.

    ``scores_RCJ``: float32, before ``softmax_scale``; column j is block j of the row's document,
    -inf where that block lies in the future or the document has no block j.
    ``layout``: the blocks that are scored.
    """

    granularity: Granularity
    scores_RCJ: Tensor
    softmax_scale: float
    layout: PackedLayout

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Scores, and block numbers inside the document (int64), of the own block, then of the
        others by falling score; both [R, C, J]. Equal scores: the lower number comes first.

        Sorted once, for coverage and for selection.
        """
        column_RC1 = self.layout.index_N[_row_block(self.layout, self.granularity)][:, None, None]
        column_RC1 = column_RC1.expand(-1, self.scores_RCJ.shape[1], 1)
        forced_RCJ = self.scores_RCJ.scatter(-1, column_RC1, torch.inf)
        ranked_RCJ, number_RCJ = forced_RCJ.sort(dim=-1, descending=True, stable=True)
        ranked_RCJ[..., :1] = self.scores_RCJ.gather(-1, column_RC1)
        return ranked_RCJ, number_RCJ


@torch.no_grad()
def router_scores(
    q_THD: Tensor,
    k_TGD: Tensor,
    layout: PackedLayout,
    *,
    granularity: Granularity,
    softmax_scale: float,
) -> RouterScores:
    """Score every visible block by query . mean(keys of the block).

    MoBA (arXiv:2502.13189, section 2.2): the mean is rounded to the keys' dtype, the product is
    float32. The query is each head's own for "token-query-head", the mean over the group's heads
    for "token-kv-head", and the mean over heads and the block's tokens for "query-block".

    Raises:
        ValueError: unknown granularity, or shapes that do not fit the layout.
    """
    check_granularity(granularity)
    _check_heads(q_THD, k_TGD, layout)
    queries_RCD = _selecting_queries(q_THD, k_TGD.shape[1], layout, granularity)
    keys_NGD = _block_means(k_TGD, layout)
    rows, heads, _ = queries_RCD.shape
    per_key = heads // keys_NGD.shape[1]
    # A view where every KV head selects for itself.
    keys_NCD = keys_NGD[:, :, None].expand(-1, -1, per_key, -1).flatten(1, 2)
    visible_RJ, block_RJ = _columns(layout, granularity)
    scores_RCJ = queries_RCD.new_empty(rows, heads, layout.max_blocks)
    # Some heads at a time: the product over all blocks of the row is wider than a document.
    at_once = max(1, _PRODUCT_ELEMENTS // (rows * layout.blocks))
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        scores_CRN = queries_RCD[:, some].transpose(0, 1) @ keys_NCD[:, some].permute(1, 2, 0)
        if layout.documents > 1:
            scores_CRN = scores_CRN.gather(2, block_RJ.expand(len(scores_CRN), -1, -1))
        hidden_CRJ = scores_CRN.masked_fill(~visible_RJ, -torch.inf)
        scores_RCJ[:, some] = hidden_CRJ.transpose(0, 1)
    return RouterScores(
        granularity=granularity, scores_RCJ=scores_RCJ, softmax_scale=softmax_scale, layout=layout
    )


@torch.no_grad()
def coverage_curves(scores: RouterScores) -> Tensor:
    """Score coverage of every budget, per document.

    C[s, k-1] is the router's softmax mass inside the own block and the best k - 1 other visible
    blocks, averaged over the document's tokens and the selecting heads. It never falls with k, and
    is exactly 1 from the document's number of blocks on.

    Returns:
        C_SK: float32 [S, J].
    """
    layout = scores.layout
    ranked_RCJ, _ = scores.ranked
    mass_NJ = ranked_RCJ.new_zeros(layout.blocks, layout.max_blocks, dtype=torch.float64)
    for ranked_RcJ in _head_chunks(ranked_RCJ):
        # The mean over rows commutes with the running sum over k, and leaves little to sum.
        mass_RJ = (ranked_RcJ * scores.softmax_scale).softmax(-1).sum(1)
        mass_NJ += _sum_of_block_tokens(mass_RJ, layout, scores.granularity)
    selectors_S = layout.tokens_S * scores.scores_RCJ.shape[1]
    mass_SJ = _sum_of_documents(mass_NJ, layout) / selectors_S[:, None]
    # A product with a triangle, since CUDA's cumsum is not reproducible; cummax heals rounding.
    curves_SK = (mass_SJ @ torch.ones_like(mass_SJ[:1]).expand(mass_SJ.shape[1], -1).triu()).float()
    budget_K = torch.arange(1, layout.max_blocks + 1, device=curves_SK.device)
    complete_SK = budget_K >= layout.blocks_S[:, None]
    return curves_SK.clamp(max=1.0).cummax(1).values.masked_fill(complete_SK, 1.0)


def coverage_at(curves_SK: Tensor, budgets: Tensor) -> Tensor:
    """Look coverage up; budgets outside 1..J read the curve's ends.

    Args:
        curves_SK: [S, J], from :func:`coverage_curves`.
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
    The base budget always does, so a budget never grows past it.

    Args:
        curves_SK: [S, J], from :func:`coverage_curves`.
        budgets_S: integers, at least 1; may exceed J.
        base_budget: may exceed J.
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
    base_S = coverage_at(curves_SK, torch.full_like(budgets_S, base_budget))
    # Subtracting a threshold >= 0 rounds to at most base_S, so the base budget is feasible.
    floor_S = base_S - threshold
    least_S = (curves_SK >= floor_S[:, None]).int().argmax(1).to(budgets_S.dtype) + 1
    short_S = coverage_at(curves_SK, budgets_S) < floor_S
    guarded_S = torch.where(short_S, torch.maximum(least_S, budgets_S), budgets_S)
    return guarded_S, guarded_S > budgets_S


@torch.no_grad()
def select_blocks(
    scores: RouterScores, budgets_S: Tensor, *, max_budget: int | None = None
) -> Selection:
    """Take the own block and the best visible others, as many as the document's budget says.

    Equal scores: the lower block number wins.

    Args:
        scores: from :func:`router_scores`.
        budgets_S: integers on the device, at least 1: KV blocks a query reads, its own included.
        max_budget: no budget is above it; sets the width of the lists, so the host must know it.
            Default: J, which holds every list. Budgets above it are cut to it.

    Raises:
        ValueError: ``budgets_S`` has not one entry per document, or ``max_budget`` is below 1.
    """
    layout = scores.layout
    if budgets_S.shape != (layout.documents,):
        raise ValueError(
            f"select_blocks: budgets_S has shape {tuple(budgets_S.shape)}: must hold one budget "
            f"for each of the {layout.documents} documents"
        )
    if max_budget is not None and max_budget < 1:
        raise ValueError(f"select_blocks: max_budget {max_budget}: must be at least 1 block")
    width = min(layout.max_blocks, max_budget or layout.max_blocks)
    block_R = _row_block(layout, scores.granularity)
    document_R = layout.document_N[block_R]
    budget_R = budgets_S[document_R].clamp(max=width)
    counts_R1 = torch.minimum(layout.index_N[block_R] + 1, budget_R)[:, None]
    number_RCK = scores.ranked[1][..., :width]
    padding_R1K = torch.arange(width, device=budgets_S.device) >= counts_R1[:, :, None]
    indices_RCK = (number_RCK + layout.first_block_S[document_R, None, None]).int()
    heads = scores.scores_RCJ.shape[1]
    return Selection(
        granularity=scores.granularity,
        indices_RCK=indices_RCK.masked_fill_(padding_R1K, -1),
        counts_RC=counts_R1.int().expand(-1, heads).contiguous(),
        layout=layout,
    )


def _check_heads(q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> None:
    fits = (
        q_THD.ndim == 3
        and k_TGD.ndim == 3
        and q_THD.shape[0] == k_TGD.shape[0] == layout.tokens
        and q_THD.shape[2] == k_TGD.shape[2]
        and q_THD.shape[1] % k_TGD.shape[1] == 0
    )
    if not fits:
        raise ValueError(
            f"router_scores: query {tuple(q_THD.shape)} and key {tuple(k_TGD.shape)} must be "
            f"[tokens, heads, head dim] with {layout.tokens} tokens as in the layout, one head "
            "dim, and query heads a multiple of KV heads"
        )


def _selecting_queries(
    q_THD: Tensor, kv_heads: int, layout: PackedLayout, granularity: Granularity
) -> Tensor:
    """float32 [R, C, D]."""
    tokens, query_heads, head_dim = q_THD.shape
    heads = selecting_heads(granularity, query_heads, kv_heads)
    group = query_heads // heads
    if granularity != "query-block":
        return q_THD.float().reshape(tokens, heads, group, head_dim).mean(2)
    sum_NHD = layout.to_blocks(q_THD).sum(1, dtype=torch.float32)
    sum_NCD = sum_NHD.unflatten(1, (heads, group)).sum(2)
    return sum_NCD / (layout.length_N * group)[:, None, None]


def _block_means(k_TGD: Tensor, layout: PackedLayout) -> Tensor:
    """float32 [N, G, D], rounded to the dtype of the keys in between."""
    wide = torch.promote_types(k_TGD.dtype, torch.float32)
    sum_NGD = layout.to_blocks(k_TGD).sum(1, dtype=wide)
    return (sum_NGD / layout.length_N[:, None, None]).to(k_TGD.dtype).float()


def _row_block(layout: PackedLayout, granularity: Granularity) -> Tensor:
    """Block [R] in which each selecting row lies."""
    if granularity == "query-block":
        return torch.arange(layout.blocks, device=layout.block_T.device)
    return layout.block_T


def _columns(layout: PackedLayout, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Per row and block of its document: whether it is visible, and its number in the row."""
    block_R = _row_block(layout, granularity)
    index_J = torch.arange(layout.max_blocks, device=block_R.device)
    first_R = layout.first_block_S[layout.document_N[block_R]]
    visible_RJ = index_J <= layout.index_N[block_R][:, None]
    return visible_RJ, (first_R[:, None] + index_J).clamp(max=layout.blocks - 1)


def _head_chunks(scores_RCJ: Tensor) -> Iterator[Tensor]:
    rows, _, columns = scores_RCJ.shape
    yield from scores_RCJ.split(max(1, _CHUNK_ELEMENTS // (rows * columns)), dim=1)


def _sum_of_block_tokens(x_RJ: Tensor, layout: PackedLayout, granularity: Granularity) -> Tensor:
    """[N, J]: sums over a block's tokens; a query block speaks for all of its tokens."""
    if granularity == "query-block":
        return x_RJ * layout.length_N[:, None]
    return layout.to_blocks(x_RJ).sum(1)


def _sum_of_documents(x_NJ: Tensor, layout: PackedLayout) -> Tensor:
    """[S, J]; a product, since scattered sums are not reproducible on CUDA."""
    document_S1 = torch.arange(layout.documents, device=x_NJ.device)[:, None]
    return (document_S1 == layout.document_N).to(x_NJ.dtype) @ x_NJ
