# SPDX-License-Identifier: Apache-2.0
"""Ranking of what a slice's queries may read, as one rank that holds the sequence would rank it.

Shape legend: T tokens of the slice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsebalance_megatron.attention.select import Selector
from sparsebalance_megatron.attention.select.summaries import SharedSummaries
from sparsebalance_megatron.attention.sequence.slice import SequenceExchange, SequenceSlice


class RankingWithMass(Protocol):
    """A dataclass with the mass that coverage is measured by, None where it is not observed."""

    @property
    def mass_SK(self) -> Tensor | None: ...


@torch.no_grad()
def rank_slice[Summarised: SharedSummaries, Ranked: RankingWithMass](
    selector: Selector[Summarised, Ranked],
    q_THD: Tensor,
    k_TGD: Tensor,
    sequence: SequenceSlice,
    *,
    exchange: SequenceExchange | None,
    softmax_scale: float,
    max_budget: int,
    observe: bool,
) -> Ranked:
    """Rank for the slice's queries, over the blocks of the sequence.

    The mass is that of all slices' queries, the same bits for each, so that budgets which follow
    from it are the same too.

    Args:
        q_THD, k_TGD: of the slice.
        exchange: how what other ranks know gets here; None where the slice is the whole sequence.
        softmax_scale, max_budget, observe: see :class:`..select.Selector`.

    Raises:
        ValueError: as the selector does; or the selector needs whole documents, which a slice does
            not hold.
    """
    if exchange is not None and getattr(selector, "needs_whole_documents", False):
        raise ValueError(
            f"{selector} needs all queries of a document, and this rank holds or has seen a part: "
            'use one segment and cp_size 1, or another selection, such as "vertical-slash"'
        )
    own = selector.summaries(q_THD, k_TGD, sequence.local_layout)
    summaries = own.parts(sequence.local_layout)
    if exchange is not None:
        summaries = exchange.summaries(summaries, sequence)
    ranking = selector.rank(
        q_THD,
        own.joined(summaries, sequence.whole_layout),
        sequence.layouts,
        softmax_scale=softmax_scale,
        max_budget=max_budget,
        observe=observe,
    )
    if ranking.mass_SK is None or exchange is None:
        return ranking
    mass_SK = exchange.total_mass(ranking.mass_SK, sequence)
    return cast("Ranked", replace(cast("Any", ranking), mass_SK=mass_SK))
