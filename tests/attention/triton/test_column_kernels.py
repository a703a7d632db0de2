# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over blocks and single columns.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, N blocks, K
places of a list.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.cases import Case, assert_identical, assert_right, with_lists
from attention.column_cases import ColumnCase, make_column_case, with_columns, with_random_columns
from attention.triton.where import DEVICE, pytestmark  # noqa: F401
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton import (
    key_block_kernel,
    query_block_kernel,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, Tiles


def _case(cu_seqlens: list[int], budgets: list[int], **settings) -> ColumnCase:
    defaults = {"block": 16, "head_dim": 16, "heads": 2, "kv_heads": 1}
    return make_column_case(cu_seqlens, budgets, device=DEVICE, **defaults | settings)


def _with_none(case: ColumnCase) -> Case:
    """A copy of the case without columns."""
    selection = dataclasses.replace(case.selection, columns=None)
    return dataclasses.replace(case, selection=selection)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (64, 16), (32, 64)])
def test_lists_of_any_length_and_order(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones, others that fill no tile, a different one for each KV head; what lies past their
    end is no token's number."""
    tile = Tile(rows=rows, columns=columns, warps=4, stages=1)
    tiles = Tiles(forward=tile, query_gradient=tile, key_gradient=tile)
    for module in (query_block_kernel, key_block_kernel):
        monkeypatch.setattr(module, "tiles_of", lambda *_: tiles)
    case = _case([0, 1, 80], [1, 1], block=32, heads=4, kv_heads=2)
    case = with_random_columns(case, 45)
    assert case.selection.columns is not None
    counts_NG = case.selection.columns.counts_NG
    assert counts_NG.min() == 0 and counts_NG.max() > 32
    assert not torch.equal(counts_NG[:, 0], counts_NG[:, 1])
    assert_right(case)


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_chunks_of_partial_sums_add_up(chunk_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk reads the document's first tokens."""
    case = _case([0, 17, 96], [1, 3], kv_heads=2)
    monkeypatch.setattr(key_block_kernel, "PARTIAL_BYTES", chunk_blocks * 8 * 2 * 16 * 16)
    readers = key_block_kernel._readers_by_row
    chunks: list[int] = []

    def counted(tokens_JGK: Tensor, *others) -> tuple[Tensor, ...]:
        chunks.append(len(tokens_JGK))
        return readers(tokens_JGK, *others)

    monkeypatch.setattr(key_block_kernel, "_readers_by_row", counted)
    assert_right(case)
    assert max(chunks) == chunk_blocks and sum(chunks) == case.selection.query_layout.blocks


def test_columns_alone() -> None:
    """Queries that read no block."""
    case = with_random_columns(_case([0, 70], [2]), 40)
    lists, columns = case.selection, case.selection.columns
    assert columns is not None and columns.counts_NG[3:].min() > 0
    counts_NG = lists.counts_QC.clone()
    counts_NG[3:] = 0
    case = with_lists(case, lists.indices_QCK, counts_NG)
    assert_right(case)
    counts_NG = columns.counts_NG.clone()
    counts_NG[3] = 0
    nothing = with_columns(case, columns.tokens_NGK, counts_NG).ours("triton", torch.float32)
    out, lse, dq = (x[48:64] for x in nothing[:3])
    assert (out == 0).all() and (lse == -torch.inf).all() and (dq == 0).all()
    assert all(x.isfinite().all() for x in (nothing[0], *nothing[2:]))


def test_empty_lists_add_nothing() -> None:
    case = _case([0, 100], [3])
    columns = case.selection.columns
    assert columns is not None
    expected = _with_none(case).ours("triton", torch.float32)
    empty = with_columns(case, columns.tokens_NGK, torch.zeros_like(columns.counts_NG))
    assert_identical(empty.ours("triton", torch.float32), expected)
    no_places = with_columns(case, columns.tokens_NGK[..., :0], torch.zeros_like(columns.counts_NG))
    assert_identical(no_places.ours("triton", torch.float32), expected)
