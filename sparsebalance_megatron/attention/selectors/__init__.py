# SPDX-License-Identifier: Apache-2.0
"""Who decides which KV blocks a query reads: what a selector offers, and those there are.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, S documents,
K budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.selectors.block_topk import BlockTopK
from sparsebalance_megatron.config import Granularity


class Selector[Scores](Protocol):
    """Lists of KV blocks under a budget, from queries and keys.

    No method reads the device from the host, carries a gradient, or gives another result in a
    recomputed pass.
    """

    def scores(
        self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout, *, softmax_scale: float
    ) -> Scores:
        """Score what may be selected; ``coverage`` and ``select`` take the result."""

    def coverage(self, scores: Scores) -> Tensor:
        """Score coverage curves_SK: float32 [S, K], the share of a document's router mass that
        budget k reaches in column k - 1, for every budget up to the most blocks of a document."""

    def select(
        self, scores: Scores, budgets_S: Tensor, *, max_budget: int | None = None
    ) -> Selection:
        """Select what the documents' budgets allow; no budget is above ``max_budget``, and one
        below 1 counts as 1."""


SELECTORS: Mapping[Granularity, Selector[Any]] = MappingProxyType(
    {
        "token-kv-head": BlockTopK(by_token=True, by_query_head=False),
        "token-query-head": BlockTopK(by_token=True, by_query_head=True),
        "previous-block": BlockTopK(by_token=False, by_query_head=False, speaker="previous-mean"),
        "first-query": BlockTopK(by_token=False, by_query_head=False, speaker="first"),
        "query-block-lookahead": BlockTopK(by_token=False, by_query_head=False),
    }
)
"""By the value of ``--sparse-balance-selection``; "token-query-head" is MoBA's. Only
"query-block-lookahead" looks at later tokens to choose what a token reads."""


def selector_named(name: str) -> Selector[Any]:
    """Look a selector up.

    Raises:
        ValueError: there is none of that name.
    """
    for known, selector in SELECTORS.items():
        if known == name:
            return selector
    raise ValueError(f"selection {name!r}: must be one of {', '.join(SELECTORS)}")
