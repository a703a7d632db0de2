# SPDX-License-Identifier: Apache-2.0
"""Two selections by block of queries that research/quality.md compares; train with neither.

One query speaks for all tokens of its block: their mean, which looks ahead and which no model that
decodes could use, so that ``check_selector`` refuses it; or the block's first query.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, S documents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.select.ranking import Ranking, RankingSelector
from sparsebalance_megatron.attention.select.streaming import rank_in_chunks
from sparsebalance_megatron.attention.select.summaries import BlockSummaries, block_means
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK


@dataclass(frozen=True, kw_only=True)
class QueryBlock(RankingSelector):
    """The own block and those of the best scores, for a block of queries and a KV head.

    Attributes:
        looks_ahead: the mean query of a block asks; otherwise its first query does.
    """

    looks_ahead: bool

    by_token = False
    work_model = QUERY_BLOCK

    @torch.no_grad()
    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
        """The mean key of every block, and the query that asks for it."""
        asking_NHD = block_means(q_THD, layout) if self.looks_ahead else q_THD[layout.start_N]
        return BlockSummaries(
            keys_NGD=block_means(k_TGD, layout).to(k_TGD.dtype),
            queries_NCD=asking_NHD.float().unflatten(1, (k_TGD.shape[1], -1)).mean(2),
        )

    @torch.no_grad()
    def rank(
        self,
        q_THD: Tensor,
        summaries: BlockSummaries,
        layouts: LayoutPair,
        *,
        softmax_scale: float,
        max_budget: int,
        observe: bool,
    ) -> Ranking:
        """Rank by scores, query . mean key."""
        assert summaries.queries_NCD is not None
        indices_QCK, mass_SK = rank_in_chunks(
            summaries.queries_NCD[layouts.own_block_N][:, :, None],
            summaries.keys_NGD,
            layouts,
            by_token=False,
            softmax_scale=softmax_scale,
            places=min(max_budget, layouts.kv_layout.max_blocks),
            observe=observe,
        )
        return Ranking(layouts=layouts, by_token=False, indices_QCK=indices_QCK, mass_SK=mass_SK)


LOOKAHEAD = QueryBlock(looks_ahead=True)
FIRST_QUERY = QueryBlock(looks_ahead=False)
