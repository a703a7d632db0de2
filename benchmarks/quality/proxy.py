# SPDX-License-Identifier: Apache-2.0
"""Router coverage against the attention mass that a budget really keeps, and against the loss.

Shape legend: T tokens of the packed sequence, t tokens of a document, H query heads, G KV heads, D
head dim, S documents, N blocks of a document, Q rows that select, C heads that select, K, J
budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quality.documents import Document
from quality.masked_attention import listed_blocks
from quality.scoring import Evaluation
from sparsebalance_megatron.attention.select import rank_sequence
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


class MassProbe:
    """Keeps, for every layer and document, router coverage and true attention mass by budget.

    The mass is what dense attention over the same queries and keys puts into the selected blocks,
    a mean over the document's tokens and query heads.

    Attributes:
        coverage_SJ, mass_SJ: by layer, a tensor for every row of documents seen.
    """

    def __init__(self) -> None:
        self.coverage_SJ: dict[int, list[Tensor]] = {}
        self.mass_SJ: dict[int, list[Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        options: AttentionOptions,
        context: LocalMicroBatch,
        softmax_scale: float,
    ) -> None:
        layout, selector = context.layout, options.selector
        ranking = rank_sequence(
            selector,
            *(q_THD, k_TGD, layout),
            softmax_scale=softmax_scale,
            max_budget=max(BUDGETS),
            observe=True,
        )
        curves_SK = selector.coverage(ranking)
        budgets = torch.tensor(BUDGETS).clamp(max=curves_SK.shape[1])
        self.coverage_SJ.setdefault(layer, []).append(curves_SK[:, budgets - 1])
        kept_J = []
        mass_THN = block_mass(q_THD, k_TGD, context, softmax_scale)
        for budget in BUDGETS:
            budgets_S = torch.full((layout.documents,), budget)
            selection = selector.select(ranking, budgets_S)
            kept_J.append(kept_mass_S(mass_THN, selection))
        self.mass_SJ.setdefault(layer, []).append(torch.stack(kept_J, dim=1))


def block_mass(
    q_THD: Tensor, k_TGD: Tensor, context: LocalMicroBatch, softmax_scale: float
) -> Tensor:
    """[T, H, N] attention mass of every token and head in every block of its document."""
    layout = context.layout
    group = q_THD.shape[1] // k_TGD.shape[1]
    mass_THN = q_THD.new_zeros(layout.tokens, q_THD.shape[1], layout.max_blocks)
    for first, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False):
        q_HtD = q_THD[first:end].transpose(0, 1)
        k_HtD = k_TGD[first:end].transpose(0, 1).repeat_interleave(group, 0)
        scores_Htt = q_HtD @ k_HtD.transpose(1, 2) * softmax_scale
        future_tt = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        p_Htt = scores_Htt.masked_fill(future_tt, -torch.inf).softmax(-1)
        index_t = layout.index_N[layout.block_T[first:end]]
        mass_HtN = p_Htt.new_zeros(*p_Htt.shape[:2], layout.max_blocks)
        mass_HtN.index_add_(2, index_t, p_Htt)
        mass_THN[first:end] = mass_HtN.transpose(0, 1)
    return mass_THN


def kept_mass_S(mass_THN: Tensor, selection: Selection) -> Tensor:
    """Mean mass of a document's tokens and heads inside the blocks that they read."""
    layout = selection.query_layout
    document_T = layout.document_N[layout.block_T]
    row_T = torch.arange(layout.tokens) if selection.by_token else layout.block_T
    heads, selecting = mass_THN.shape[1], selection.counts_QC.shape[1]
    listed_QCN = listed_blocks(selection)
    listed_THN = listed_QCN[row_T].repeat_interleave(heads // selecting, 1)
    kept_T = (mass_THN * listed_THN).sum(2).mean(1)
    sums_S = kept_T.new_zeros(layout.documents).index_add_(0, document_T, kept_T)
    return sums_S / layout.tokens_S


def probe_points(
    evaluation: Evaluation, documents: Sequence[Document], probe: MassProbe
) -> dict[str, list[list[float]]]:
    """Means over documents by budget, for JSON.

    The model runs once for every budget, since what one layer reads changes the next one's queries.

    Args:
        probe: the one that the model's layers call.

    Returns:
        ``points``: [document, layer, budget, coverage, mass]; ``losses``: [document, budget, loss,
        accuracy].
    """
    points, losses = [], []
    for place, budget in enumerate(BUDGETS):
        probe.coverage_SJ.clear()
        probe.mass_SJ.clear()
        document = 0
        for row in evaluation.rows(documents, budget):
            for number in range(len(row.documents)):
                mine = row.document_X == number
                loss, right = row.loss_X[mine].mean(), row.right_X[mine].mean()
                losses.append([document + number, budget, float(loss), float(right)])
            document += len(row.documents)
        for layer in sorted(probe.mass_SJ):
            coverage_S = torch.cat([each[:, place] for each in probe.coverage_SJ[layer]])
            mass_S = torch.cat([each[:, place] for each in probe.mass_SJ[layer]])
            points += [
                [number, layer, budget, float(coverage), float(mass)]
                for number, (coverage, mass) in enumerate(zip(coverage_S, mass_S, strict=True))
            ]
    return {"points": points, "losses": losses}
