# SPDX-License-Identifier: Apache-2.0
"""Blocks and columns in the order in which budgets take them, and the mass that each budget adds.

Where budgets buy columns, a budget of k blocks is k - c(k) blocks and c(k) blocks' worth of
columns, c(k) = (k + 1) // 4: own block, block before it, columns, block, then a block's worth of
columns in every fourth place. The columns are the best ones outside of the blocks, so a query block
reads exactly the keys of k whole blocks, whatever it reads; where it sees no more than k blocks, it
reads them all. Lists of a larger budget hold those of a smaller one.

Shape legend: X places of a list of columns, J rows of lists.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.attention.selection import ColumnLists, Selection, named


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The own block, then the other visible blocks in the order in which budgets take them.

    Attributes:
        by_token: whether tokens select (Q is T) or blocks of queries (Q is N).
        indices_QCK: int16 or int32 numbers of blocks in the keys' sequence, up to the widest
            budget, -1 past the visible ones.
        columns_NGX: where budgets buy columns too, int32 numbers of tokens in the keys' sequence,
            the best first, -1 past the visible ones; else None.
        mass_SK: float64; in column k - 1 the mass that budget k reads beyond budget k - 1, summed
            over the tokens and the selecting heads of the queries' sequence, each of which has mass
            1; for every k up to the most blocks of a document. NaN throughout for a document with
            mass that is not finite. Parts of ranks that share a sequence add up. None where nobody
            observes.
    """

    layouts: LayoutPair
    by_token: bool
    indices_QCK: Tensor
    columns_NGX: Tensor | None = None
    mass_SK: Tensor | None


class RankingSelector:
    """The last two steps of a :class:`..select.Selector` that ranks by a :class:`Ranking`."""

    @torch.no_grad()
    def coverage(self, ranking: Ranking) -> Tensor:
        """Coverage curves_SK of documents: float32, the mean of the ranking's mass up to each
        budget.

        Curves rise to exactly 1 at the document's number of blocks. A document with mass that is
        not finite has NaN throughout. A ranking without mass is a ValueError.
        """
        if ranking.mass_SK is None:
            raise ValueError("coverage: the ranking holds no mass: rank with observe=True")
        layout, heads = ranking.layouts.kv_layout, ranking.indices_QCK.shape[1]
        mean_SK = ranking.mass_SK / (layout.tokens_S * heads)[:, None]
        # A product with a triangle, since CUDA's cumsum is not reproducible; one number that is not
        # finite makes its row NaN throughout. cummax heals rounding.
        triangle_KK = torch.ones_like(mean_SK[:1]).expand(mean_SK.shape[1], -1).triu()
        curves_SK = (mean_SK @ triangle_KK).float()
        broken_S1 = curves_SK[:, :1].isnan()
        budget_K = torch.arange(1, mean_SK.shape[1] + 1, device=curves_SK.device)
        complete_SK = budget_K >= layout.blocks_S[:, None]
        curves_SK = curves_SK.clamp(max=1.0).cummax(1).values.masked_fill(complete_SK, 1.0)
        return curves_SK.masked_fill(broken_S1, torch.nan)

    @torch.no_grad()
    def select(self, ranking: Ranking, budgets_S: Tensor) -> Selection:
        """Cut the lists to the documents' budgets; other than one for each is a ValueError."""
        layouts, kv_layout = ranking.layouts, ranking.layouts.kv_layout
        if budgets_S.shape != (kv_layout.documents,):
            raise ValueError(
                f"select: budgets_S has shape {tuple(budgets_S.shape)}: must hold one budget for "
                f"each of the {kv_layout.documents} documents"
            )
        _, heads, width = ranking.indices_QCK.shape
        block_Q = layouts.kv_block(by_token=ranking.by_token)
        # By block of the keys' sequence.
        budget_N = budgets_S.clamp(1, width)[kv_layout.document_N]
        visible_N = kv_layout.index_N + 1
        counts_N, columns = torch.minimum(visible_N, budget_N).int(), None
        if ranking.columns_NGX is not None and column_blocks(width):
            columns_N = column_blocks(budget_N).masked_fill(visible_N <= budget_N, 0)
            counts_N = counts_N - columns_N.int()
            lists = ranking.indices_QCK, ranking.columns_NGX
            columns = cut_columns(layouts, *lists, counts_N[block_Q], columns_N[block_Q])
        return Selection(
            indices_QCK=ranking.indices_QCK,
            counts_QC=counts_N[block_Q, None].expand(-1, heads).contiguous(),
            by_token=ranking.by_token,
            query_layout=layouts.query_layout,
            kv_layout=kv_layout,
            own_block_N=layouts.own_block_N,
            columns=columns,
        )


def coverage_at(curves_SK: Tensor, budgets: Tensor) -> Tensor:
    """Coverage at budgets, integers [S, any]; those outside 1..K read the curve's ends."""
    return curves_SK.gather(1, budgets.long().clamp(1, curves_SK.shape[1]) - 1)


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
    """The best columns outside of the blocks that a budget reads: of each query block ``blocks_N``
    blocks, and ``columns_N`` blocks' worth of columns."""
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
        read_JGW = named(blocks_NGK[part] - first_J11, blocks_N[part, None], layout.max_blocks)
        taken_JGX = best_outside(block_JGX, tokens_JGX >= 0, read_JGW, counts_NG[part, :, None])
        place_JGX = taken_JGX.cumsum(-1).sub_(1).masked_fill_(~taken_JGX, width)
        listed = tokens_JGX.new_full((*tokens_JGX.shape[:2], width + 1), -1)
        tokens_NGK[part] = listed.scatter_(2, place_JGX, tokens_JGX)[..., :width]
    return ColumnLists(tokens_NGK=tokens_NGK, counts_NG=counts_NG)


def best_outside(
    block_JGX: Tensor, candidate_JGX: Tensor, read_JGW: Tensor, count_JG1: Tensor | int
) -> Tensor:
    """bool [..., J, G, X]: the first ``count_JG1`` candidates, best first, whose block is not read;
    dimensions that ``read_JGW`` has in front stay."""
    block_JGX = block_JGX.expand(*read_JGW.shape[:-1], -1)
    outside_JGX = candidate_JGX & ~read_JGW.gather(-1, block_JGX)
    return outside_JGX & (outside_JGX.cumsum(-1, dtype=torch.int32) <= count_JG1)
