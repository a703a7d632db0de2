# SPDX-License-Identifier: Apache-2.0
"""Router mass summed over the rows of a document, in an order that is the same each time.

Shape legend: S documents of the keys' row, K places of a list, Q rows that select, Y some of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.row_pair import RowPair


class DocumentMass:
    """Router mass per document and place, from some rows at a time.

    Rows are tokens, or blocks: those of blocks count once per token.
    """

    def __init__(self, rows: RowPair, *, by_token: bool) -> None:
        kv_layout = rows.kv_layout
        self._document_Q = kv_layout.document_N[rows.row_block(by_token=by_token)]
        # A query block speaks for all of its tokens.
        self._tokens_Q = None if by_token else rows.query_layout.length_N
        self._mass_SK = torch.zeros(
            *(kv_layout.documents, kv_layout.max_blocks),
            dtype=torch.float64,
            device=self._document_Q.device,
        )
        self._broken_S = self._mass_SK.new_zeros(kv_layout.documents, dtype=torch.bool)

    def add(self, rows: slice, documents: slice, mass_KY: Tensor, broken_Y: Tensor) -> None:
        """Add float64 mass by place, of rows whose documents are among ``documents``.

        Rows that are broken break their document; their mass must be 0 here.
        """
        document_S1 = torch.arange(documents.start, documents.stop, device=mass_KY.device)[:, None]
        inside_SY = document_S1 == self._document_Q[rows]
        self._broken_S[documents] |= (inside_SY & broken_Y).any(1)
        weights_SY = inside_SY.to(mass_KY.dtype)
        if self._tokens_Q is not None:
            weights_SY *= self._tokens_Q[rows]
        # A product, since scattered sums are not reproducible on CUDA.
        mass_SK = weights_SY @ mass_KY.t()
        places = min(mass_SK.shape[1], self._mass_SK.shape[1])
        self._mass_SK[documents, :places] += mass_SK[:, :places]

    def of_documents(self) -> Tensor:
        """float64 [S, K]; NaN in documents with mass that is not finite."""
        return self._mass_SK.masked_fill_(self._broken_S[:, None], torch.nan)
