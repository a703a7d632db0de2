# SPDX-License-Identifier: Apache-2.0
"""What a member's queries may read, ranked as one rank that holds the row would rank it.

Shape legend: T tokens of this member's row, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.shard import RowShard
from sparsebalance_megatron.attention.context_parallel.summaries import (
    gather_summaries,
    sum_over_members,
)
from sparsebalance_megatron.attention.row_pair import RowPair
from sparsebalance_megatron.attention.selectors import Selector
from sparsebalance_megatron.attention.selectors.summaries import SharedSummaries


class SummedRanking(Protocol):
    """A dataclass with the mass by which coverage is measured, None where nobody observes."""

    @property
    def mass_SK(self) -> Tensor | None: ...


@torch.no_grad()
def rank_shared_row[Summarised: SharedSummaries, Ranked: SummedRanking](
    selector: Selector[Summarised, Ranked],
    q_THD: Tensor,
    k_TGD: Tensor,
    shard: RowShard,
    group: dist.ProcessGroup | None,
    *,
    softmax_scale: float,
    max_budget: int,
    observe: bool,
) -> Ranked:
    """Rank for this member's queries, over the blocks of the packed row.

    One collective, and another where coverage is observed; none in a context group of one member.
    The mass is that of all members' queries, the same bits on every member, so that budgets which
    follow from it are the same too.

    Args:
        q_THD, k_TGD: of this member's row.
        shard: what this member holds.
        group: the context group; all its members call at the same place of their programs.
        softmax_scale, max_budget, observe: see :class:`..selectors.Selector`.

    Raises:
        ValueError: as the selector does.
    """
    own = selector.summaries(q_THD, k_TGD, shard.local_layout)
    parts = gather_summaries(own.parts(shard.local_layout), shard, group)
    rows = RowPair(
        query_layout=shard.local_layout,
        kv_layout=shard.row_layout,
        own_blocks=shard.owners.blocks_of(shard.member).tolist(),
        own_block_N=shard.own_block_N,
    )
    ranking = selector.rank(
        q_THD,
        own.joined(parts, shard.row_layout),
        rows,
        softmax_scale=softmax_scale,
        max_budget=max_budget,
        observe=observe,
    )
    if ranking.mass_SK is None:
        return ranking
    mass_SK = sum_over_members(ranking.mass_SK, shard, group)
    return cast("Ranked", replace(cast("Any", ranking), mass_SK=mass_SK))
