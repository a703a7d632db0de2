# SPDX-License-Identifier: Apache-2.0
"""Blocks in the order in which budgets take them, and the router's mass in each place.

Shape legend: T tokens of the packed sequence, S documents of the keys' sequence, N blocks of the
queries' row, K places of a list, Q rows that select, C heads that select.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The own block, then the other visible blocks by falling score, up to the widest budget.

    Attributes:
        layouts: where queries and keys lie.
        by_token: whether tokens select (Q is T) or blocks of queries (Q is N).
        indices_QCK: int32 numbers of blocks in the keys' sequence, -1 past the visible ones.
        mass_SK: float64; in column k - 1 the router mass that the k-th best block adds, summed over
            the tokens and the selecting heads of the queries' sequence, each of which has mass 1;
            for every k up to the most blocks of a document. NaN throughout for a document with mass
            that is not finite. Parts of ranks that share a sequence add up. None where nobody
            observes.
    """

    layouts: LayoutPair
    by_token: bool
    indices_QCK: Tensor
    mass_SK: Tensor | None

    def cut(self, budgets_S: Tensor) -> Selection:
        """Take as many blocks as the document's budget says, and there are.

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
        block_Q = self.layouts.kv_block(by_token=self.by_token)
        budget_Q = budgets_S.clamp(1, width)[kv_layout.document_N[block_Q]]
        counts_Q = torch.minimum(kv_layout.index_N[block_Q] + 1, budget_Q).int()
        return Selection(
            indices_QCK=self.indices_QCK,
            counts_QC=counts_Q[:, None].expand(-1, heads).contiguous(),
            by_token=self.by_token,
            query_layout=self.layouts.query_layout,
            kv_layout=kv_layout,
            own_block_N=self.layouts.own_block_N,
        )
