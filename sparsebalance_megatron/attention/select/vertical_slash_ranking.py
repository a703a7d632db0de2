# SPDX-License-Identifier: Apache-2.0
"""Block diagonals and columns in the order in which budgets take them, and the cut.

A budget of k blocks is k - c(k) blocks and c(k) blocks' worth of columns, c(k) = (k + 1) // 4: own
block, block before it, columns, block, then a block's worth of columns in every fourth place. The
columns are the best ones outside of the blocks, so a query block reads exactly the keys of k whole
blocks, whatever it reads; where it sees no more than k blocks, it reads them all. Lists of a larger
budget hold those of a smaller one.

Shape legend: S documents, N blocks of the queries' sequence, G KV heads, K places of a list of
blocks, X places of a list of columns, J rows of lists, W blocks of a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.selection import ColumnLists, Selection

_CUT_ELEMENTS = 1 << 22
"""Entries of lists of columns that are cut at once."""


def column_blocks[Number: (int, Tensor)](budget_blocks: Number) -> Number:
    """c(k): how many of a budget's blocks are spent on columns."""
    return (budget_blocks + 1) // 4


@dataclass(frozen=True, kw_only=True, eq=False)
class VerticalSlashRanking:
    """What every query block may read, per KV head, up to the widest budget.

    Attributes:
        layouts: where queries and keys lie. blocks_NGK: int32 numbers of blocks in the keys'
        sequence: the own block, the block before it,
            then the others by falling mass of their diagonals; -1 past the visible ones.
        columns_NGX: int32 numbers of tokens in the keys' sequence, those of blocks that every
        budget
            above 1 reads left out: a document's first tokens, then the others by falling mass; -1
            past the visible ones.
        mass_SK: float64; in column k - 1 the softmax mass that budget k reads beyond budget k - 1,
            summed over tokens and KV heads, each of which has mass 1; for every k up to the most
            blocks of a document. NaN throughout for a document with mass that is not finite. None
            where nobody observes.
    """

    layouts: LayoutPair
    blocks_NGK: Tensor
    columns_NGX: Tensor
    mass_SK: Tensor | None

    def cut(self, budgets_S: Tensor) -> Selection:
        """Take what the documents' budgets allow.

        Args:
            budgets_S: integers on the device. Below 1 they count as 1, since the own block is
                always read, and the host cannot check them; above K as K.

        Raises:
            ValueError: ``budgets_S`` has not one entry per document.
        """
        own_N, layout = self.layouts.own_block_N, self.layouts.kv_layout
        if budgets_S.shape != (layout.documents,):
            raise ValueError(
                f"select: budgets_S has shape {tuple(budgets_S.shape)}: must hold one budget for "
                f"each of the {layout.documents} documents"
            )
        width = self.blocks_NGK.shape[2]
        budget_N = budgets_S.long().clamp(1, width)[layout.document_N[own_N]]
        visible_N = layout.index_N[own_N] + 1
        columns_N = column_blocks(budget_N).masked_fill(visible_N <= budget_N, 0)
        blocks_N = torch.minimum(visible_N, budget_N) - columns_N
        return Selection(
            indices_QCK=self.blocks_NGK,
            counts_QC=self._per_head(blocks_N),
            by_token=False,
            query_layout=self.layouts.query_layout,
            kv_layout=layout,
            own_block_N=own_N,
            columns=self._columns(blocks_N, columns_N) if column_blocks(width) else None,
        )

    def _columns(self, blocks_N: Tensor, columns_N: Tensor) -> ColumnLists:
        layout, (rows, heads, places) = self.layouts.kv_layout, self.columns_NGX.shape
        width = column_blocks(self.blocks_NGK.shape[2]) * layout.block_size
        tokens_NGK = self.columns_NGX.new_empty(rows, heads, width)
        first_N = layout.first_block_S[layout.document_N[self.layouts.own_block_N]]
        at_once = max(1, _CUT_ELEMENTS // (heads * places))
        for row in range(0, rows, at_once):
            part = slice(row, row + at_once)
            tokens_JGX = self.columns_NGX[part]
            first_J11 = first_N[part, None, None]
            block_JGX = layout.block_T[tokens_JGX.clamp(min=0).long()] - first_J11
            # What is past a list's end lies in any block; it is no candidate.
            block_JGX.clamp_(min=0)
            read_JGW = read_blocks(
                self.blocks_NGK[part] - first_J11, blocks_N[part, None], layout.max_blocks
            )
            taken_JGX = best_outside(
                *(block_JGX, tokens_JGX >= 0, read_JGW),
                (columns_N[part] * layout.block_size)[:, None, None],
            )
            place_JGX = taken_JGX.cumsum(-1).sub_(1).masked_fill_(~taken_JGX, width)
            listed = tokens_JGX.new_full((*tokens_JGX.shape[:2], width + 1), -1)
            tokens_NGK[part] = listed.scatter_(2, place_JGX, tokens_JGX)[..., :width]
        return ColumnLists(
            tokens_NGK=tokens_NGK, counts_NG=self._per_head(columns_N * layout.block_size)
        )

    def _per_head(self, counts_N: Tensor) -> Tensor:
        return counts_N.int()[:, None].expand(-1, self.blocks_NGK.shape[1]).contiguous()


def read_blocks(order_JGK: Tensor, count_JG: Tensor, blocks: int) -> Tensor:
    """Which blocks of a document are read as blocks.

    Args:
        order_JGK: numbers of blocks inside the document; anything past the ``count_JG`` first.
        count_JG: how many are read; sizes of 1 are broadcast.
        blocks: W.

    Returns:
        bool [J, G, W].
    """
    place_K = torch.arange(order_JGK.shape[2], device=order_JGK.device)
    # What is not read lands in an extra column, which is cut off.
    number_JGK = torch.where(place_K < count_JG[..., None], order_JGK, blocks).long()
    read_JGW = torch.zeros(
        *order_JGK.shape[:2], blocks + 1, dtype=torch.bool, device=order_JGK.device
    )
    return read_JGW.scatter_(2, number_JGK, True)[..., :blocks]


def best_outside(
    block_JGX: Tensor, candidate_JGX: Tensor, read_JGW: Tensor, count_J11: Tensor | int
) -> Tensor:
    """Which columns are read: the first so many candidates whose block is not read as a block.

    Args:
        block_JGX: the block inside its document of every column, best columns first.
        candidate_JGX: bool.
        read_JGW: of :func:`read_blocks`.
        count_J11: how many columns are read.

    Returns:
        bool [J, G, X].
    """
    outside_JGX = candidate_JGX & ~read_JGW.gather(2, block_JGX)
    return outside_JGX & (outside_JGX.cumsum(-1, dtype=torch.int32) <= count_J11)
