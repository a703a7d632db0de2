# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks every query reads: what the router hands to attention.

Shape legend: T tokens of the packed row, H query heads, G KV heads, N blocks of the row, R rows
that select, C heads that select, K width of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout

Granularity = Literal["query-block", "token-kv-head", "token-query-head"]
"""Who selects: (block of queries, KV head), (token, KV head) or (token, query head). The last is
MoBA's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Lists of KV blocks, one per selecting row and head.

    R is N for query blocks and T for tokens; C is G, and H where every query head selects.

    Attributes:
        granularity: who selects.
        indices_RCK: int32 numbers of blocks in the row (0..N-1) without repetition, all of the
            selecting row's document. The row's own block comes first, then past blocks by falling
            score; -1 past the list's end.
        counts_RC: int32 lengths of the lists.
        layout: the blocks the numbers refer to.
    """

    granularity: Granularity
    indices_RCK: Tensor
    counts_RC: Tensor
    layout: PackedLayout


def check_granularity(granularity: str) -> None:
    """Raise ValueError for an unknown granularity."""
    if granularity not in get_args(Granularity):
        raise ValueError(
            f"granularity {granularity!r}: must be one of {', '.join(get_args(Granularity))}"
        )


def selecting_rows(granularity: Granularity, layout: PackedLayout) -> int:
    """R: blocks or tokens of the row."""
    return layout.blocks if granularity == "query-block" else layout.tokens


def selecting_heads(granularity: Granularity, query_heads: int, kv_heads: int) -> int:
    """C: KV heads, or query heads where each selects for itself."""
    return query_heads if granularity == "token-query-head" else kv_heads
