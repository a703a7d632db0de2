# SPDX-License-Identifier: Apache-2.0
"""Selecting rows cut into chunks that see few blocks, from what the host knows.

Shape legend: N blocks of the queries' row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.attention.row_pair import RowPair

_BEYOND_FRACTION = 4


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive selecting rows and all that they may select from.

    ``rows``: tokens or blocks of the queries' row. ``blocks``: of the keys' row, from the first
    that any row may read to the last. ``documents``: of the keys' row, from the first to the last.
    """

    rows: slice
    blocks: slice
    documents: slice

    @property
    def columns(self) -> int:
        """Blocks that are scored."""
        return self.blocks.stop - self.blocks.start


def chunks(
    pair: RowPair, *, by_token: bool, heads: int, elements: int, most_rows: int | None = None
) -> Iterator[Chunk]:
    """Cut the rows such that rows x heads x columns stay within ``elements``, or a row is alone.

    ``most_rows`` bounds the rows of a chunk besides.

    A row may read the blocks of its own document up to its own block. What a chunk's product
    computes beyond that is at most a quarter of ``elements``, besides what one block needs.
    """
    kv_layout = pair.kv_layout
    own_N = np.asarray(pair.own_blocks)
    document_N = kv_layout.document_on_host[own_N]
    first_N = np.searchsorted(kv_layout.document_on_host, document_N)
    blocks = pair.query_layout.blocks
    bounds = pair.query_layout.bounds_on_host if by_token else np.arange(blocks + 1)
    needed = np.cumsum((own_N + 1 - first_N) * np.diff(bounds)) * heads
    begin, low, high, done = 0, int(first_N[0]), int(own_N[0]) + 1, 0
    for block in range(1, blocks + 1):
        if block < blocks:
            wider_low = min(low, int(first_N[block]))
            wider_high = max(high, int(own_N[block]) + 1)
            rows = int(bounds[block + 1] - bounds[begin])
            computed = rows * heads * (wider_high - wider_low)
            beyond = computed - int(needed[block]) + done
            fits = computed <= elements and (most_rows is None or rows <= most_rows)
            if fits and beyond <= elements // _BEYOND_FRACTION:
                low, high = wider_low, wider_high
                continue
        documents = document_N[begin:block]
        last_row = int(bounds[block])
        at_once = max(1, elements // (heads * (high - low)))
        at_once = at_once if most_rows is None else min(at_once, most_rows)
        for row in range(int(bounds[begin]), last_row, at_once):
            yield Chunk(
                rows=slice(row, min(row + at_once, last_row)),
                blocks=slice(low, high),
                documents=slice(int(documents.min()), int(documents.max()) + 1),
            )
        if block < blocks:
            low, high = int(first_N[block]), int(own_N[block]) + 1
            begin, done = block, int(needed[block - 1])
