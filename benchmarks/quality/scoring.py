# SPDX-License-Identifier: Apache-2.0
"""Scores of a trained model on held-out documents. Imports Megatron.

Shape legend: T tokens of the packed sequence, S documents, L layers, X scored labels, W words of
the vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quality.documents import Document
from quality.scoring_sums import Tally
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.data.packing import pack, packed_cu_seqlens
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

READS_ALL = -2
"""Step of a micro-batch that is evaluated with dense attention; sparse evaluation has -1."""
ROW_TOKENS = 4096
"""Documents are scored in rows of about so many."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Documents side by side, with what came of them."""

    documents: Sequence[Document]
    right_X: np.ndarray
    loss_X: np.ndarray
    document_X: np.ndarray

    @property
    def places_X(self) -> np.ndarray:
        return np.concatenate([each.places[each.scored] for each in self.documents])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a model is read.

    Attributes:
        model: a ``GPTModel``, or one that wraps it.
        block_size, layers: the model's.
        longest_tokens: of any document.
    """

    model: Callable[..., Tensor]
    block_size: int
    layers: int
    longest_tokens: int

    @torch.no_grad()
    def rows(self, documents: Sequence[Document], budget: int | None) -> Iterator[Row]:
        """Run the model over documents, in their order.

        Args:
            budget: KV blocks a query reads; None is dense attention.
        """
        for some in in_rows(documents, ROW_TOKENS):
            samples = [document.sample for document in some]
            cu_seqlens = packed_cu_seqlens([sample.length_tokens for sample in samples])
            row, context = pack(samples, cu_seqlens), self._context(cu_seqlens, budget)
            logits_1TW = self.model(
                torch.from_numpy(row.tokens)[None],
                torch.from_numpy(row.position_ids)[None],
                None,
                packed_seq_params=context.params(),
            )
            at_X = torch.from_numpy(np.flatnonzero(row.loss_mask))
            logits_XW, label_X = logits_1TW[0, at_X].float(), torch.from_numpy(row.labels)[at_X]
            loss_X = torch.nn.functional.cross_entropy(logits_XW, label_X, reduction="none")
            yield Row(
                documents=some,
                right_X=(logits_XW.argmax(-1) == label_X).numpy().astype(np.float64),
                loss_X=loss_X.double().numpy(),
                document_X=np.repeat(np.arange(len(some)), [each.scored.sum() for each in some]),
            )

    def _context(self, cu_seqlens: Sequence[int], budget: int | None) -> LocalMicroBatch:
        layout, width = packed_layout(cu_seqlens, self.block_size, "cpu"), budget or 1
        return LocalMicroBatch(
            layout=layout,
            budgets_LS=torch.full((self.layers, layout.documents), width, dtype=torch.int32),
            max_budgets=(width,) * self.layers,
            observe=False,
            step=READS_ALL if budget is None else -1,
        )


def tally(rows: Iterable[Row], edges: Sequence[int]) -> Tally:
    """Scores of all rows."""
    found = Tally(edges=edges)
    for row in rows:
        found.add(row.places_X, row.right_X, row.loss_X)
    return found


def tally_by_length(rows: Iterable[Row], edges: Sequence[int]) -> Tally:
    """Scores of all rows by the tokens of their documents."""
    found = Tally(edges=edges)
    for row in rows:
        lengths_S = np.array([document.sample.length_tokens for document in row.documents])
        found.add(lengths_S[row.document_X], row.right_X, row.loss_X)
    return found


def in_rows(documents: Sequence[Document], row_tokens: int) -> Iterator[list[Document]]:
    """Documents in their order, as many together as ``row_tokens`` holds, at least one."""
    row: list[Document] = []
    tokens = 0
    for document in documents:
        length = document.sample.length_tokens
        if row and tokens + length > row_tokens:
            yield row
            row, tokens = [], 0
        row.append(document)
        tokens += length
    if row:
        yield row
