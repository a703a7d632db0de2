# SPDX-License-Identifier: Apache-2.0
"""Budgets that buy single columns besides blocks.

A budget of k blocks is k - c(k) blocks and c(k) blocks' worth of columns, c(k) = (k + 1) // 4: own
block, block before it, columns, block, then a block's worth of columns in every fourth place. The
columns are the best ones outside of the blocks, so a query block reads exactly the keys of k whole
blocks, whatever it reads; where it sees no more than k blocks, it reads them all. Lists of a larger
budget hold those of a smaller one.

Shape legend: S documents, N blocks of the queries' sequence, G KV heads, K places of a list of
blocks, X places of a list of columns, J rows of lists, W blocks of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.selection import ColumnLists

_CUT_ELEMENTS = 1 << 22
"""Entries of lists of columns that are cut at once."""


def column_blocks[Number: (int, Tensor)](budget_blocks: Number) -> Number:
    """c(k): how many of a budget's blocks are spent on columns."""
    return (budget_blocks + 1) // 4


def cut_columns(
    layouts: LayoutPair,
    blocks_NGK: Tensor,
    columns_NGX: Tensor,
    blocks_N: Tensor,
    columns_N: Tensor,
) -> ColumnLists:
    """The best columns outside of the blocks that a budget reads.

    Args:
        layouts: where queries and keys lie.
        blocks_NGK, columns_NGX: see :class:`.ranking.Ranking`.
        blocks_N: how many blocks each query block reads.
        columns_N: how many blocks' worth of columns.
    """
    layout, (rows, heads, places) = layouts.kv_layout, columns_NGX.shape
    width = column_blocks(blocks_NGK.shape[2]) * layout.block_size
    tokens_NGK = columns_NGX.new_empty(rows, heads, width)
    first_N11 = layout.first_block_S[layout.document_N[layouts.own_block_N]][:, None, None]
    counts_NG = (columns_N * layout.block_size).int()[:, None].expand(-1, heads).contiguous()
    at_once = max(1, _CUT_ELEMENTS // (heads * places))
    for row in range(0, rows, at_once):
        part = slice(row, row + at_once)
        tokens_JGX, first_J11 = columns_NGX[part], first_N11[part]
        # What is past a list's end lies in any block; it is no candidate.
        block_JGX = (layout.block_T[tokens_JGX.clamp(min=0).long()] - first_J11).clamp_(min=0)
        read_JGW = read_blocks(
            blocks_NGK[part] - first_J11, blocks_N[part, None], layout.max_blocks
        )
        taken_JGX = best_outside(block_JGX, tokens_JGX >= 0, read_JGW, counts_NG[part, :, None])
        place_JGX = taken_JGX.cumsum(-1).sub_(1).masked_fill_(~taken_JGX, width)
        listed = tokens_JGX.new_full((*tokens_JGX.shape[:2], width + 1), -1)
        tokens_NGK[part] = listed.scatter_(2, place_JGX, tokens_JGX)[..., :width]
    return ColumnLists(tokens_NGK=tokens_NGK, counts_NG=counts_NG)


def read_blocks(order_JGK: Tensor, count_JG: Tensor, blocks: int) -> Tensor:
    """Choose the blocks of a document that are read as blocks.

    Args:
        order_JGK: numbers of blocks inside the document; anything past the ``count_JG`` first.
        count_JG: how many are read; broadcast, and may have dimensions in front of J.
        blocks: W.

    Returns:
        bool [J, G, W], behind the dimensions that ``count_JG`` has in front.
    """
    place_K = torch.arange(order_JGK.shape[2], device=order_JGK.device)
    # What is not read lands in an extra column, which is cut off.
    number_JGK = torch.where(place_K < count_JG[..., None], order_JGK, blocks).long()
    read_JGW = torch.zeros(
        *number_JGK.shape[:-1], blocks + 1, dtype=torch.bool, device=order_JGK.device
    )
    return read_JGW.scatter_(-1, number_JGK, True)[..., :blocks]


def best_outside(
    block_JGX: Tensor, candidate_JGX: Tensor, read_JGW: Tensor, count_JG1: Tensor | int
) -> Tensor:
    """Choose columns: the first candidates whose block is not read as a block, up to their number.

    Args:
        block_JGX: the block inside its document of every column, best columns first.
        candidate_JGX: bool.
        read_JGW: of :func:`read_blocks`.
        count_JG1: how many columns are read.

    Returns:
        bool [J, G, X], behind the dimensions that ``read_JGW`` has in front.
    """
    block_JGX = block_JGX.expand(*read_JGW.shape[:-1], -1)
    outside_JGX = candidate_JGX & ~read_JGW.gather(-1, block_JGX)
    return outside_JGX & (outside_JGX.cumsum(-1, dtype=torch.int32) <= count_JG1)
