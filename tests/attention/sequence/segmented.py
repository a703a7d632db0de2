# SPDX-License-Identifier: Apache-2.0
"""One layer and micro-batch that runs segment by segment, on one rank or on several."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from attention.cases import SCALE, SELECTORS, Case, example_selector, listed, make_case, ranked
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.earlier_segments import (
    EarlierSegments,
    segment_slice,
)
from sparsebalance_megatron.attention.sequence.exchange import rank_slice, sequence_attention
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup

CU_SEQLENS, BUDGETS, BLOCK, BLOCKS = [0, 1, 2, 30, 51, 190, 203], [1, 3, 2, 3, 4, 2], 8, 29
EVERY_SELECTOR = SELECTORS | {"quest": example_selector()}


@dataclass
class Segmented:
    """Leaves are cut out of a case: what this rank of ``ranks`` holds."""

    case: Case
    selector: Any
    segment_starts_blocks: list[int]
    dtype: torch.dtype = torch.float64
    implementation: str = "auto"
    recompute: bool = False
    ranks: SequenceGroup = field(default_factory=SequenceGroup)
    segments: EarlierSegments = field(init=False)
    selections: dict[int, Selection] = field(default_factory=dict)
    curves: dict[int, Tensor] = field(default_factory=dict)
    results: list[tuple[Tensor, list[Tensor], Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments = EarlierSegments(self.ranks.exchange)

    def forward(self, segment: int) -> None:
        held = segment_slice(
            CU_SEQLENS, self.segment_starts_blocks, segment, block_size=BLOCK, ranks=self.ranks
        )
        tokens = torch.from_numpy(held.tokens_T)
        inputs = (x[tokens] for x in (self.case.q_THD, self.case.k_TGD, self.case.v_TGF))
        leaves = [x.to(self.dtype, copy=True).requires_grad_() for x in inputs]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            ranking = rank_slice(
                *(self.selector, q, k, held),
                exchange=self.segments,
                softmax_scale=SCALE,
                max_budget=max(BUDGETS),
                observe=True,
            )
            begun_S = torch.tensor(BUDGETS[: held.whole_layout.documents])
            self.curves[segment] = self.selector.coverage(ranking)
            self.selections[segment] = self.selector.select(ranking, begun_S)
            return sequence_attention(
                *(q, k, v, self.selections[segment], held),
                exchange=self.segments,
                softmax_scale=SCALE,
                implementation=self.implementation,
            )

        out, lse = (
            checkpoint(attend, *leaves, use_reentrant=False) if self.recompute else attend(*leaves)
        )
        self.results.append((tokens, leaves, out, lse))

    def backward(self, segment: int) -> None:
        tokens, _, out, _ = self.results[segment]
        out.backward(self.case.dout_THF[tokens].to(self.dtype))

    def run(self) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv of all segments one after the other; of those tokens that are
        :attr:`tokens_T`."""
        order = range(len(self.segment_starts_blocks))
        for segment in order:
            self.forward(segment)
        for segment in reversed(order):
            self.backward(segment)
        every = [
            (out.detach(), lse, *(leaf.grad for leaf in leaves))
            for _, leaves, out, lse in self.results
        ]
        return tuple(torch.cat(each) for each in zip(*every, strict=True))

    @property
    def tokens_T(self) -> Tensor:
        return torch.cat([tokens for tokens, *_ in self.results])


def case_of(kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Case:
    heads = {"head_dim": 8, "value_dim": 4, "kv_heads": kv_heads}
    return make_case(CU_SEQLENS, BUDGETS, block=BLOCK, dtype=dtype, **heads)


def whole_of(case: Case, selector: Any, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """The case with the selector's lists over the whole sequence, and their coverage."""
    q, k = (x.to(dtype) for x in (case.q_THD, case.k_TGD))
    layout = case.selection.kv_layout
    ranking = ranked(selector, [q, k], layout, max_budget=max(BUDGETS), observe=True)
    selection = selector.select(ranking, torch.tensor(BUDGETS))
    whole = Case(case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF, BUDGETS, "", selection)
    return whole, selector.coverage(ranking)


def read(selection: Selection) -> list[tuple[list[int], ...]]:
    """What every row and head reads: blocks and, as negative numbers, columns."""
    found, columns = listed(selection.indices_QCK, selection.counts_QC), selection.columns
    if columns is not None:
        for place, tokens in listed(-1 - columns.tokens_NGK, columns.counts_NG).items():
            found[place] = found[place] + tokens
    return list(itertools.batched(found.values(), selection.counts_QC.shape[1]))
