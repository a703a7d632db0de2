# SPDX-License-Identifier: Apache-2.0
"""A selector of another package: blocks by the upper bounds of their scores, as Quest ranks pages.

Quest (arXiv:2406.10774, section 3.3) keeps the least and the greatest key of every page, channel by
channel; no key of the page can score more than ``sum_d max(q_d least_d, q_d greatest_d)``. Split by
sign this is a product, ``[max(q, 0), min(q, 0)] . [greatest, least]``, so the plugin's own ranking
serves: summaries of twice the head dim. Quest decodes with it; here every token of training selects
with it. A bound is not what a block's keys score, so coverage is that of the bounds.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, N blocks,
S documents, C heads that select, E query heads of a selecting head.
"""

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.select.ranking import Ranking, RankingSelector
from sparsebalance_megatron.attention.select.streaming import rank_in_chunks
from sparsebalance_megatron.attention.select.summaries import BlockSummaries
from sparsebalance_megatron.cost.work_model import BlockTopK as BlockTopKWork


class Quest(RankingSelector):
    """The own block, and the blocks before it with the highest bounds, per token and KV head."""

    by_token = True
    work_model = BlockTopKWork(per_token=True, per_query_head=False)

    @torch.no_grad()
    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
        """The greatest and the least key of every block, side by side."""
        index_TGD = layout.block_T[:, None, None].expand_as(k_TGD)
        greatest_NGD, least_NGD = (
            k_TGD.new_full((layout.blocks, *k_TGD.shape[1:]), fill).scatter_reduce_(
                0, index_TGD, k_TGD, how
            )
            for fill, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
        )
        return BlockSummaries(keys_NGD=torch.cat([greatest_NGD, least_NGD], -1), queries_NCD=None)

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
        """Rank by bounds, the mean over the query heads of a KV head."""
        q_TGED = q_THD.unflatten(1, (summaries.keys_NGD.shape[1], -1))
        indices_QCK, mass_SK = rank_in_chunks(
            torch.cat([q_TGED.clamp(min=0.0), q_TGED.clamp(max=0.0)], -1),
            summaries.keys_NGD,
            layouts,
            by_token=True,
            softmax_scale=softmax_scale,
            places=min(max_budget, layouts.kv_layout.max_blocks),
            observe=observe,
        )
        return Ranking(layouts=layouts, by_token=True, indices_QCK=indices_QCK, mass_SK=mass_SK)


QUEST = Quest()
"""What the entry point names."""
