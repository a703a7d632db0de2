# SPDX-License-Identifier: Apache-2.0
"""Blocks and columns in the order in which budgets take them, and the mass that each budget adds.

Shape legend: S documents of the keys' sequence, N blocks of the queries' sequence, K places of a
list of blocks, X places of a list of columns, Q rows that select, C heads that select.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.coverage import curves_of_mass
from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.select.columns import column_blocks, cut_columns
from sparsebalance_megatron.attention.selection import ColumnLists, Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The own block, then the other visible blocks in the order in which budgets take them.

    Attributes:
        layouts: where queries and keys lie.
        by_token: whether tokens select (Q is T) or blocks of queries (Q is N).
        indices_QCK: int16 or int32 numbers of blocks in the keys' sequence, up to the widest
            budget, -1 past the visible ones.
        columns_NGX: where budgets buy columns too (:mod:`.columns`), int32 numbers of tokens in the
            keys' sequence, the best first, -1 past the visible ones; else None.
        mass_SK: float64; in column k - 1 the mass that budget k reads beyond budget k - 1, summed
            over the tokens and the selecting heads of the queries' sequence, each of which has mass
            1; for every k up to the most blocks of a document. NaN throughout for a document with
            mass that is not finite. Parts of ranks that share a sequence add up. None where nobody
            observes.
        in_triton: whether coverage and the cut are computed by Triton kernels too.
    """

    layouts: LayoutPair
    by_token: bool
    indices_QCK: Tensor
    columns_NGX: Tensor | None = None
    mass_SK: Tensor | None
    in_triton: bool = False

    def cut(self, budgets_S: Tensor) -> Selection:
        """Take what the documents' budgets allow, and there is.

        Args:
            budgets_S: integers on the device: KV blocks a query reads, its own included. Below 1
                they count as 1, since the own block is always read, and the host cannot check them;
                above K as K.

        Raises:
            ValueError: ``budgets_S`` has not one entry per document.
        """
        kv_layout = self.layouts.kv_layout
        if budgets_S.shape != (kv_layout.documents,):
            raise ValueError(
                f"select: budgets_S has shape {tuple(budgets_S.shape)}: must hold one budget for "
                f"each of the {kv_layout.documents} documents"
            )
        _, heads, width = self.indices_QCK.shape
        columns = None
        if self.in_triton:
            from sparsebalance_megatron.attention.select.ranking_kernels import counts_of_budgets

            counts_QC = counts_of_budgets(
                self.layouts, budgets_S, by_token=self.by_token, heads=heads, width=width
            )
        else:
            counts_QC, columns = self._cut(budgets_S)
        return Selection(
            indices_QCK=self.indices_QCK,
            counts_QC=counts_QC,
            by_token=self.by_token,
            query_layout=self.layouts.query_layout,
            kv_layout=kv_layout,
            own_block_N=self.layouts.own_block_N,
            columns=columns,
        )

    def _cut(self, budgets_S: Tensor) -> tuple[Tensor, ColumnLists | None]:
        """Lengths of the lists of blocks, and lists of columns where budgets buy them."""
        kv_layout, (_, heads, width) = self.layouts.kv_layout, self.indices_QCK.shape
        block_Q = self.layouts.kv_block(by_token=self.by_token)
        budget_Q = budgets_S.clamp(1, width)[kv_layout.document_N[block_Q]]
        visible_Q = kv_layout.index_N[block_Q] + 1
        counts_Q, columns = torch.minimum(visible_Q, budget_Q), None
        if self.columns_NGX is not None and column_blocks(width):
            columns_N = column_blocks(budget_Q).masked_fill(visible_Q <= budget_Q, 0)
            counts_Q = counts_Q - columns_N
            columns = cut_columns(
                self.layouts, self.indices_QCK, self.columns_NGX, counts_Q, columns_N
            )
        return counts_Q.int()[:, None].expand(-1, heads).contiguous(), columns


class RankingSelector:
    """The last two steps of a :class:`..select.Selector` that ranks by a :class:`Ranking`."""

    @torch.no_grad()
    def coverage(self, ranking: Ranking) -> Tensor:
        """Score coverage of every budget, per document; see :class:`..select.Selector`.

        Raises:
            ValueError: the ranking was made without ``observe``.
        """
        if ranking.mass_SK is None:
            raise ValueError("coverage: the ranking holds no mass: rank with observe=True")
        heads = ranking.indices_QCK.shape[1]
        if ranking.in_triton:
            from sparsebalance_megatron.attention.select import ranking_kernels

            return ranking_kernels.curves_of_mass(
                ranking.mass_SK, ranking.layouts.kv_layout, selecting_heads=heads
            )
        return curves_of_mass(ranking.mass_SK, ranking.layouts.kv_layout, selecting_heads=heads)

    @torch.no_grad()
    def select(self, ranking: Ranking, budgets_S: Tensor) -> Selection:
        """Cut the lists to the documents' budgets; see :class:`..select.Selector`."""
        return ranking.cut(budgets_S)
