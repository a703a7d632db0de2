# SPDX-License-Identifier: Apache-2.0
"""Which blocks the blocks of a document read, of a trained model: what rings would share out.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, S documents,
N blocks of a document (n of the row), Q rows that select, C heads that select, K places of a list.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quality.masked_attention import listed_blocks
from sparsebalance_megatron.attention.select import rank_sequence
from sparsebalance_megatron.attention.selection import ColumnLists, Selection
from sparsebalance_megatron.megatron.core_attention import AttentionOptions
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

LEAST_BLOCKS = 32
"""Least blocks of documents that are kept."""


class WorkProbe:
    """Keeps, for every layer and long document, how many query-key pairs two blocks compute.

    Attributes:
        found: (blocks_NN, columns_NN) of every layer and document: of lists of blocks, and of
            single columns; means over heads.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.found: list[tuple[np.ndarray, np.ndarray]] = []

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
            max_budget=self._budget,
            observe=False,
        )
        selection = selector.select(ranking, torch.full((layout.documents,), self._budget))
        pairs_nN = block_pairs(selection)
        columns_nn = column_pairs(selection)
        for document in range(layout.documents):
            first = int(layout.first_block_S[document])
            blocks = int((layout.document_N == document).sum())
            if blocks >= LEAST_BLOCKS:
                some = slice(first, first + blocks)
                self.found.append((pairs_nN[some, :blocks].numpy(), columns_nn[some, some].numpy()))

    def save(self, path: Path) -> None:
        """As arrays ``blocks<i>`` and ``columns<i>``."""
        arrays = {
            f"{name}{place}": array
            for place, pair in enumerate(self.found)
            for name, array in zip(("blocks", "columns"), pair, strict=True)
        }
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def block_pairs(selection: Selection) -> Tensor:
    """float64 [n, N] query-key pairs of a query block with a block of its document, mean of heads.

    A block is read whole, the own one up to the query.
    """
    layout = selection.query_layout
    block_Q = layout.block_T if selection.by_token else layout.number_N
    listed_QN = listed_blocks(selection).double().mean(1)
    tokens_Q = layout.length_N[block_Q].double() if not selection.by_token else 1.0
    read_nN = listed_QN.new_zeros(layout.blocks, listed_QN.shape[1])
    read_nN.index_add_(0, block_Q, listed_QN * torch.as_tensor(tokens_Q).reshape(-1, 1))
    pairs_nN = read_nN * layout.block_tokens
    own_n = layout.index_N[:, None]
    length_n1 = layout.length_N[:, None].double()
    listed_own_n1 = pairs_nN.gather(1, own_n) > 0
    return pairs_nN.scatter(1, own_n, listed_own_n1 * length_n1 * (length_n1 + 1) / 2)


def column_pairs(selection: Selection) -> Tensor:
    """float64 [n, n] query-key pairs of a query block with single columns of a block."""
    layout = selection.query_layout
    pairs_nn = torch.zeros(layout.blocks, layout.blocks, dtype=torch.float64)
    columns: ColumnLists | None = selection.columns
    if columns is None:
        return pairs_nn
    places, heads = columns.tokens_NGK.shape[2], columns.tokens_NGK.shape[1]
    present_NGK = torch.arange(places) < columns.counts_NG[..., None]
    for block in range(layout.blocks):
        tokens = columns.tokens_NGK[block][present_NGK[block]].long()
        pairs_nn[block].index_add_(
            0, layout.block_T[tokens], torch.ones(len(tokens), dtype=torch.float64)
        )
    return pairs_nn * layout.length_N[:, None] / heads
