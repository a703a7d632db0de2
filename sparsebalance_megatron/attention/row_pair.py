# SPDX-License-Identifier: Apache-2.0
"""The row that queries come from, the row that keys come from, and which block is which.

Shape legend: N blocks of the queries' row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.attention.host_copy import copied_to
from sparsebalance_megatron.attention.layout import PackedLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPair:
    """Queries and the keys they select from; they may lie in different packed rows.

    Where a rank holds some blocks of a row, its queries lie in a row of their own, while the keys
    are those of the whole row, whose documents are the training documents.

    Attributes:
        query_layout: the blocks of the queries' row, in any order.
        kv_layout: the blocks of the keys' row, documents whole and their blocks in order.
        own_blocks: N entries on the host, for every query block the number in ``kv_layout`` of the
            block that it is itself.
        own_block_N: the same, int64 on the device.
    """

    query_layout: PackedLayout
    kv_layout: PackedLayout
    own_blocks: Sequence[int]
    own_block_N: Tensor

    @classmethod
    def within(cls, layout: PackedLayout) -> RowPair:
        """Queries and keys of the same row."""
        return cls(
            query_layout=layout,
            kv_layout=layout,
            own_blocks=range(layout.blocks),
            own_block_N=layout.number_N,
        )

    @classmethod
    def of_blocks(
        cls, query_layout: PackedLayout, kv_layout: PackedLayout, own_blocks: Sequence[int]
    ) -> RowPair:
        """Queries of some blocks of the keys' row.

        Raises:
            ValueError: ``own_blocks`` has not one entry per query block, names a block that the
                keys' row lacks, or one of another length.
        """
        own_N = np.asarray(own_blocks, dtype=np.int64)
        if own_N.shape != (query_layout.blocks,):
            raise ValueError(
                f"own_blocks has shape {own_N.shape}: must name one block of the keys' row for "
                f"each of the {query_layout.blocks} query blocks"
            )
        wrong_N = (own_N < 0) | (own_N >= kv_layout.blocks)
        lengths_N = np.diff(kv_layout.bounds_on_host)[np.where(wrong_N, 0, own_N)]
        wrong_N |= lengths_N != np.diff(query_layout.bounds_on_host)
        if wrong_N.any():
            place = int(np.argmax(wrong_N))
            raise ValueError(
                f"own_blocks: query block {place} is said to be block {own_N[place]} of the keys' "
                f"row, which has {kv_layout.blocks} blocks: must be one of them, of the same length"
            )
        return cls(
            query_layout=query_layout,
            kv_layout=kv_layout,
            own_blocks=tuple(own_N.tolist()),
            own_block_N=copied_to(torch.from_numpy(own_N), query_layout.number_N.device),
        )

    def row_block(self, *, by_token: bool) -> Tensor:
        """int64 [T] or [N]: the block of the keys' row in which each token lies, or each block."""
        return self.own_block_N[self.query_layout.block_T] if by_token else self.own_block_N
