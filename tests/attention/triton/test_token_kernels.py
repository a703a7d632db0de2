# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for selections by token, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.cases import (
    Case,
    assert_as_good_as_plain,
    assert_right,
    in_shards,
    make_case,
    with_lists,
)
from attention.triton.where import DEVICE, pytestmark  # noqa: F401

from sparsebalance_megatron.attention.kernels import triton as implementation
from sparsebalance_megatron.attention.kernels.triton import (
    device_functions,
    index,
    token_kernels,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, Tiles

BY_KV_HEAD, BY_QUERY_HEAD = "token-kv-head", "token-query-head"


def _case(cu_seqlens: list[int], budgets: list[int], block: int = 16, **settings) -> Case:
    defaults = {"head_dim": 16, "heads": 2, "kv_heads": 1, "granularity": BY_KV_HEAD}
    return make_case(cu_seqlens, budgets, block=block, device=DEVICE, **defaults | settings)


def _use_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    tile = Tile(rows=rows, columns=columns, warps=4, stages=1)
    tiles = Tiles(forward=tile, query_gradient=tile, key_gradient=tile)
    monkeypatch.setattr(token_kernels, "tiles_of", lambda *_: tiles)


def _popular(case: Case, block: int) -> Case:
    """Every later token of the block's document that reads two blocks reads this one."""
    layout = case.selection.query_layout
    indices_TCK = case.selection.indices_QCK.clone()
    later_T = layout.block_T > block
    assert (layout.document_N[layout.block_T[later_T]] == layout.document_N[block]).all()
    indices_TCK[later_T, :, 1] = block
    return with_lists(case, indices_TCK, case.selection.counts_QC)


@pytest.mark.parametrize("granularity", [BY_KV_HEAD, BY_QUERY_HEAD])
def test_chunks_launches_and_cut_lists_add_up(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of 32 rows in launches of three, keys of half a block, a block that all read."""
    _use_tiles(monkeypatch, rows=16, columns=16)
    monkeypatch.setattr(index, "FEWEST_TILE_READERS", 8)
    monkeypatch.setattr(token_kernels, "WANTED_PROGRAMS", 1000)
    monkeypatch.setattr(token_kernels, "PARTIAL_BYTES", 3 * 32 * 18 * 4)
    monkeypatch.setattr(device_functions, "PART_BYTES", 8 << 13)
    case = _popular(_case([0, 100], [2], 32, heads=4, kv_heads=2, granularity=granularity), 0)
    chunks: list[token_kernels.Chunks] = []
    parts: list[int] = []
    chunks_of, invert = token_kernels.Chunks.of, device_functions.inverse_lists

    def chunked(*args, **kwargs):
        chunks.append(chunks_of(*args, **kwargs))
        return chunks[-1]

    def inverse(*args, **kwargs):
        found = invert(*args, **kwargs)
        parts.append(int(found.parts_U[: 2 * 4].max()))
        return found

    monkeypatch.setattr(token_kernels.Chunks, "of", chunked)
    monkeypatch.setattr(device_functions, "inverse_lists", inverse)
    assert_right(case)
    assert {(x.rows, x.at_once, x.programs) for x in chunks} == {(32, 3, 14)}
    assert len(chunks) == 2 and min(parts) > 1


def test_a_group_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heads lie in two tiles."""
    _use_tiles(monkeypatch, rows=16, columns=16)
    assert_right(_case([0, 20], [2], heads=32))


def test_parts_of_lists_and_rows_of_their_own_add_up() -> None:
    """Also lists without the own block, and empty ones."""
    case = _case([0, 1, 30, 62], [1, 2, 3])
    parts = in_shards(case, "triton", torch.float32, [[0, 2, 4], [1, 3]], [range(5)])
    assert_as_good_as_plain(case, parts, torch.float32, case.plain(torch.float64))


def test_rows_too_many_for_31_bits_are_refused() -> None:
    """The row lies on the meta device, so that it needs no memory."""
    case = _case([0, 20], [2])
    lists_TCK = torch.empty(20, 1, 1 << 27, dtype=torch.int32, device="meta")
    selection = dataclasses.replace(case.selection, indices_QCK=lists_TCK)
    q_THD = case.q_THD.to(DEVICE)
    assert "too few for 20 rows" in str(implementation.obstacle(q_THD, q_THD, selection))
    assert implementation.obstacle(q_THD, q_THD, case.selection) is None
