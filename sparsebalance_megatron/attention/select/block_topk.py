# SPDX-License-Identifier: Apache-2.0
"""MoBA's router without parameters: the own block, a document's first ones, the best others."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import undisturbed
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.select.ranking import Ranking, RankingSelector
from sparsebalance_megatron.attention.select.streaming import rank_in_chunks
from sparsebalance_megatron.attention.select.summaries import (
    BlockSummaries,
    block_means,
    check_heads,
)
from sparsebalance_megatron.config import Router


@dataclass(frozen=True, kw_only=True)
class BlockTopK(RankingSelector):
    """The own block, first blocks and the best others, as many as the budget says.

    MoBA, arXiv:2502.13189, reads the own block and the best others: ``first_blocks`` 0. Pretrained
    models put much of their attention on a document's first token ("attention sink", StreamingLLM,
    arXiv:2309.17453), which its block's mean key does not show. A block's score is, as in MoBA,
    query . mean(keys of the block), the mean rounded to the keys' dtype, the product float32. The
    query is the mean over the heads that select together; where the tokens of a block do, it is the
    mean query of the block before it, so that no token's choice depends on later tokens.

    Attributes:
        by_token: whether every token selects for itself, or the tokens of a block together.
        by_query_head: likewise query heads, or the heads of a KV head together.
        first_blocks: blocks at the beginning of a document that every query reads besides its own,
            within its budget; they come first in lists, in their order.
        router: who computes; see :func:`..summaries.ranks_in_triton`.
    """

    by_token: bool
    by_query_head: bool
    first_blocks: int = 1
    router: Router = "auto"

    def with_router(self, router: Router) -> "BlockTopK":
        return replace(self, router=router)

    def with_first_blocks(self, first_blocks: int) -> "BlockTopK":
        return replace(self, first_blocks=first_blocks)

    @torch.no_grad()
    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
        check_heads("summaries", q_THD, layout.tokens, k_TGD, layout.tokens)
        with undisturbed(q_THD.device):
            return BlockSummaries(
                keys_NGD=block_means(k_TGD, layout, self.router).to(k_TGD.dtype),
                queries_NCD=self._mean_queries(q_THD, k_TGD.shape[1], layout),
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
        """Rank what each row may read; see :class:`..select.Selector`.

        Equal scores: the lower block number wins. NaN comes last of what is visible. Scores are
        float32 inside ``torch.autocast`` too, and where CUDA takes TF32 for other products.
        """
        keys_NGD, tokens = summaries.keys_NGD, layouts.query_layout.tokens
        check_heads("rank", q_THD, tokens, keys_NGD, layouts.kv_layout.blocks, max_budget)
        with undisturbed(q_THD.device):
            indices_QCK, mass_SK = rank_in_chunks(
                self._queries(q_THD, summaries, layouts),
                keys_NGD,
                layouts,
                by_token=self.by_token,
                softmax_scale=softmax_scale,
                places=min(max_budget, layouts.kv_layout.max_blocks),
                observe=observe,
                first_blocks=self.first_blocks,
                router=self.router,
            )
        return Ranking(
            layouts=layouts, by_token=self.by_token, indices_QCK=indices_QCK, mass_SK=mass_SK
        )

    def _mean_queries(self, q_THD: Tensor, kv_heads: int, layout: PackedLayout) -> Tensor | None:
        """float32 [N, C, D], where blocks select."""
        if self.by_token:
            return None
        heads = q_THD.shape[1] if self.by_query_head else kv_heads
        return block_means(q_THD, layout, self.router).float().unflatten(1, (heads, -1)).mean(2)

    def _queries(self, q_THD: Tensor, summaries: BlockSummaries, layouts: LayoutPair) -> Tensor:
        """[Q, C, any, D]: queries whose mean over the third dimension asks."""
        means_NCD = summaries.queries_NCD
        if means_NCD is None:
            heads = q_THD.shape[1] if self.by_query_head else summaries.keys_NGD.shape[1]
            return q_THD.unflatten(1, (heads, -1))
        own_N = layouts.own_block_N
        # The first block of a document sees itself alone, whatever its query is.
        first_N = layouts.kv_layout.index_N[own_N] == 0
        asking_NCD = means_NCD[(own_N - 1).clamp_(min=0)]
        return asking_NCD.masked_fill_(first_N[:, None, None], 0.0)[:, :, None]


TOKEN_QUERY_HEAD = BlockTopK(by_token=True, by_query_head=True)
TOKEN_KV_HEAD = BlockTopK(by_token=True, by_query_head=False)
PREVIOUS_BLOCK = BlockTopK(by_token=False, by_query_head=False)
