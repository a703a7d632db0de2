# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: what it counts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_contenders import Case, Shape, causal_pairs, selected_pairs, selection_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("skewed", "granularity"),
    [
        (False, "previous-block"),
        (True, "previous-block"),
        (True, "token-kv-head"),
        (False, "vertical-slash"),
    ],
)
def test_counted_pairs_are_those_that_are_read(skewed: bool, granularity: str) -> None:
    case = Case(tokens=300, block_size=32, budget=4, skewed=skewed, selection=granularity)
    shape = Shape(query_heads=6, kv_heads=2, head_dim=16)
    selection = selection_of(case, shape, CPU)
    layout = selection.query_layout
    read = total = 0
    for query in range(case.tokens):
        block = int(layout.block_T[query])
        start = layout.cu_seqlens[int(layout.document_N[block])]
        total += (query - start + 1) * 6
        row = query if selection.by_token else block
        for kv_head in range(2):
            count = int(selection.counts_QC[row, kv_head])
            assert count <= case.budgets[int(layout.document_N[block])]
            listed = set(selection.indices_QCK[row, kv_head, :count].tolist())
            keys = range(start, query + 1)
            read += 3 * sum(int(layout.block_T[key]) in listed for key in keys)
            if selection.columns is not None:
                read += 3 * int(selection.columns.counts_NG[row, kv_head])
    assert selected_pairs(selection, shape) == read
    assert causal_pairs(case, shape) == total
