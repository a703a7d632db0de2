# SPDX-License-Identifier: Apache-2.0
"""MoBA's parameter-free router: the own block, and the visible blocks of the best scores.

Nothing here reads the device from the host, so budgets may differ in every call at no cost.
Every result is the same in a recomputed pass: no atomics, no unstable sort.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, S documents,
N blocks of the row, J block number inside a document (as a size: the most blocks of any document),
K budgets (as many as J) or places of a list, Q rows that select, C heads that select.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sparsebalance_megatron.attention.coverage import curves_of_mass
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.precision import outside_autocast, warn_of_tf32
from sparsebalance_megatron.attention.selection import Selection

Speaker = Literal["own-mean", "previous-mean", "first"]
"""The mean query of the block itself, or of the block before it, or the block's first query."""

_CHUNK_ELEMENTS = 1 << 26
"""Elements of a temporary [Q, heads, J]: 256 MiB in float32."""
_PRODUCT_ELEMENTS = 1 << 19
"""Elements of a product [heads, Q, N]: many heads if rows are blocks, one if they are tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockScores:
    """Scores of the blocks of each row's own document.

    ``by_token``: whether tokens select, or blocks of queries.
    ``scores_QCJ``: float32, before ``softmax_scale``; column j is block j of the row's document,
    -inf where that block lies in the future or the document has no block j.
    ``layout``: the blocks that are scored.
    """

    by_token: bool
    scores_QCJ: Tensor
    softmax_scale: float
    layout: PackedLayout

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Scores, and block numbers inside the document (int64), of the own block, then of the
        others by falling score; both [Q, C, J]. Equal scores: the lower number comes first. NaN
        comes last of what is visible.

        Sorted once, for coverage and for selection.
        """
        own_Q11 = self.layout.index_N[_row_block(self.layout, self.by_token)][:, None, None]
        number_J = torch.arange(self.scores_QCJ.shape[2], device=own_Q11.device)
        # Only the own block's key is +inf. NaN's is -inf, as that of the future, whose numbers are
        # higher.
        greatest = torch.finfo(self.scores_QCJ.dtype).max
        keys_QCJ = self.scores_QCJ.nan_to_num(nan=-torch.inf, posinf=greatest, neginf=-greatest)
        keys_QCJ.masked_fill_(number_J > own_Q11, -torch.inf)
        keys_QCJ.masked_fill_(number_J == own_Q11, torch.inf)
        number_QCJ = keys_QCJ.argsort(dim=-1, descending=True, stable=True)
        return self.scores_QCJ.gather(-1, number_QCJ), number_QCJ


@dataclass(frozen=True, kw_only=True)
class BlockTopK:
    """The own block and the best others, as many as the budget says (MoBA, arXiv:2502.13189).

    Attributes:
        by_token: whether every token selects for itself, or the tokens of a block together.
        by_query_head: whether every query head selects for itself, or the heads of a KV head
            together.
        speaker: which query stands for a block whose tokens select together. Only "own-mean" looks
            ahead: what a token reads then depends on the queries after it in its block.
    """

    by_token: bool
    by_query_head: bool
    speaker: Speaker = "own-mean"

    @torch.no_grad()
    def scores(
        self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout, *, softmax_scale: float
    ) -> BlockScores:
        """Score every visible block by query . mean(keys of the block).

        MoBA, section 2.2: the mean is rounded to the keys' dtype, the product is float32, inside
        ``torch.autocast`` too; a warning says so where CUDA takes TF32 for it. The query is the
        mean over those that select together, or their ``speaker``.

        Raises:
            ValueError: shapes do not fit one another or the layout.
        """
        _check_heads(q_THD, k_TGD, layout)
        warn_of_tf32(q_THD.device)
        with outside_autocast(q_THD.device):
            scores_QCJ = self._scores(q_THD, k_TGD, layout)
        return BlockScores(
            by_token=self.by_token,
            scores_QCJ=scores_QCJ,
            softmax_scale=softmax_scale,
            layout=layout,
        )

    def _scores(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> Tensor:
        queries_QCD = self._selecting_queries(q_THD, k_TGD.shape[1], layout)
        keys_NGD = _block_means(k_TGD, layout)
        rows, heads, _ = queries_QCD.shape
        per_key = heads // keys_NGD.shape[1]
        # A view where every KV head selects for itself.
        keys_NCD = keys_NGD[:, :, None].expand(-1, -1, per_key, -1).flatten(1, 2)
        visible_QJ, block_QJ = self._columns(layout)
        scores_QCJ = queries_QCD.new_empty(rows, heads, layout.max_blocks)
        # Some heads at a time: the product over all blocks of the row is wider than a document.
        at_once = max(1, _PRODUCT_ELEMENTS // (rows * layout.blocks))
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            scores_CQN = queries_QCD[:, some].transpose(0, 1) @ keys_NCD[:, some].permute(1, 2, 0)
            if layout.documents > 1:
                scores_CQN = scores_CQN.gather(2, block_QJ.expand(len(scores_CQN), -1, -1))
            hidden_CQJ = scores_CQN.masked_fill(~visible_QJ, -torch.inf)
            scores_QCJ[:, some] = hidden_CQJ.transpose(0, 1)
        return scores_QCJ

    @torch.no_grad()
    def coverage(self, scores: BlockScores) -> Tensor:
        """Score coverage of every budget, per document.

        C[s, k-1] is the router's softmax mass inside the own block and the best k - 1 other visible
        blocks, averaged over the document's tokens and the selecting heads.

        Returns:
            curves_SK: float32 [S, J], see :func:`..coverage.curves_of_mass`.
        """
        layout = scores.layout
        ranked_QCJ, _ = scores.ranked
        rows, heads, columns = ranked_QCJ.shape
        mass_NJ = ranked_QCJ.new_zeros(layout.blocks, columns, dtype=torch.float64)
        for ranked_QcJ in ranked_QCJ.split(max(1, _CHUNK_ELEMENTS // (rows * columns)), dim=1):
            # The mean over rows commutes with the running sum over k, and leaves little to sum.
            mass_QJ = (ranked_QcJ * scores.softmax_scale).softmax(-1).sum(1)
            if scores.by_token:
                mass_NJ += layout.to_blocks(mass_QJ).sum(1)
            else:
                # A query block speaks for all of its tokens.
                mass_NJ += mass_QJ * layout.length_N[:, None]
        return curves_of_mass(mass_NJ, layout, selecting_heads=heads)

    @torch.no_grad()
    def select(
        self, scores: BlockScores, budgets_S: Tensor, *, max_budget: int | None = None
    ) -> Selection:
        """Take the own block and the best visible others, as many as the document's budget says.

        Equal scores: the lower block number wins.

        Args:
            scores: from :meth:`scores`.
            budgets_S: integers on the device: KV blocks a query reads, its own included. Below 1
                they count as 1, since the own block is always read, and the host cannot check them.
            max_budget: no budget is above it; sets the width of the lists, so the host must know
                it. Default: J, which holds every list. Budgets above it are cut to it.

        Raises:
            ValueError: ``budgets_S`` has not one entry per document, or ``max_budget`` is below 1.
        """
        layout = scores.layout
        if budgets_S.shape != (layout.documents,):
            raise ValueError(
                f"select: budgets_S has shape {tuple(budgets_S.shape)}: must hold one budget for "
                f"each of the {layout.documents} documents"
            )
        if max_budget is not None and max_budget < 1:
            raise ValueError(f"select: max_budget {max_budget}: must be at least 1 block")
        width = min(layout.max_blocks, max_budget or layout.max_blocks)
        block_Q = _row_block(layout, scores.by_token)
        document_Q = layout.document_N[block_Q]
        budget_Q = budgets_S[document_Q].clamp(1, width)
        counts_Q1 = torch.minimum(layout.index_N[block_Q] + 1, budget_Q)[:, None]
        number_QCK = scores.ranked[1][..., :width]
        padding_Q1K = torch.arange(width, device=budgets_S.device) >= counts_Q1[:, :, None]
        indices_QCK = (number_QCK + layout.first_block_S[document_Q, None, None]).int()
        heads = scores.scores_QCJ.shape[1]
        return Selection.within(
            layout,
            indices_QCK=indices_QCK.masked_fill_(padding_Q1K, -1),
            counts_QC=counts_Q1.int().expand(-1, heads).contiguous(),
            by_token=scores.by_token,
        )

    def _selecting_queries(self, q_THD: Tensor, kv_heads: int, layout: PackedLayout) -> Tensor:
        """float32 [Q, C, D]."""
        tokens, query_heads, head_dim = q_THD.shape
        heads = query_heads if self.by_query_head else kv_heads
        group = query_heads // heads
        if self.by_token:
            return q_THD.float().reshape(tokens, heads, group, head_dim).mean(2)
        if self.speaker == "first":
            return q_THD[layout.start_N].float().unflatten(1, (heads, group)).mean(2)
        sum_NHD = layout.to_blocks(q_THD).sum(1, dtype=torch.float32)
        sum_NCD = sum_NHD.unflatten(1, (heads, group)).sum(2)
        mean_NCD = sum_NCD / (layout.length_N * group)[:, None, None]
        if self.speaker == "own-mean":
            return mean_NCD
        # The first block of a document sees itself alone, whatever its query is.
        return mean_NCD.roll(1, 0).masked_fill_((layout.index_N == 0)[:, None, None], 0.0)

    def _columns(self, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Per row and block of its document: whether it is visible, and its number in the row."""
        block_Q = _row_block(layout, self.by_token)
        index_J = torch.arange(layout.max_blocks, device=block_Q.device)
        first_Q = layout.first_block_S[layout.document_N[block_Q]]
        visible_QJ = index_J <= layout.index_N[block_Q][:, None]
        return visible_QJ, (first_Q[:, None] + index_J).clamp(max=layout.blocks - 1)


def _row_block(layout: PackedLayout, by_token: bool) -> Tensor:
    """Block [Q] in which each selecting row lies."""
    return layout.block_T if by_token else layout.number_N


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
            f"scores: query {tuple(q_THD.shape)} and key {tuple(k_TGD.shape)} must be "
            f"[tokens, heads, head dim] with {layout.tokens} tokens as in the layout, one head "
            "dim, and query heads a multiple of KV heads"
        )


def _block_means(k_TGD: Tensor, layout: PackedLayout) -> Tensor:
    """float32 [N, G, D], rounded to the dtype of the keys in between."""
    wide = torch.promote_types(k_TGD.dtype, torch.float32)
    sum_NGD = layout.to_blocks(k_TGD).sum(1, dtype=wide)
    return (sum_NGD / layout.length_N[:, None, None]).to(k_TGD.dtype).float()
