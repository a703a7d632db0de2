# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against float64: by Triton's interpreter on the CPU, compiled on a GPU."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from attention.cases import (
    Case,
    assert_identical,
    assert_right,
    make_case,
    on_device,
    with_lists,
)
from attention.triton.where import DEVICE, INTERPRETED, pytestmark  # noqa: F401

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.kernels.triton import (
    device_functions,
    key_block_kernel,
    query_block_kernel,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, Tiles


def _case(cu_seqlens: list[int], budgets: list[int], block: int = 32, **settings) -> Case:
    return make_case(cu_seqlens, budgets, block=block, device=DEVICE, **{"head_dim": 64} | settings)


HEAD_DIMS = ((64, 64), (80, 96), (96, 40), (128, 128), (192, 128))
HEADS = ((2, 2), (3, 1), (4, 1))
# The interpreter knows no shapes of threads: there, every value of either comes once.
HEAD_SHAPES = (
    [(*dims, *HEADS[i % 3]) for i, dims in enumerate(HEAD_DIMS)]
    if INTERPRETED
    else [(*dims, *heads) for dims in HEAD_DIMS for heads in HEADS]
)


@pytest.mark.parametrize(("head_dim", "value_dim", "heads", "kv_heads"), HEAD_SHAPES)
def test_head_dims_and_groups(head_dim: int, value_dim: int, heads: int, kv_heads: int) -> None:
    dims = {"head_dim": head_dim, "value_dim": value_dim}
    assert_right(_case([0, 20, 97], [1, 2], **dims, heads=heads, kv_heads=kv_heads))


def test_a_group_of_sixteen() -> None:
    assert_right(_case([0, 45], [2], 16, heads=16, kv_heads=1))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 32), (64, 16), (128, 64)])
def test_tiles_smaller_and_larger_than_a_head_of_a_block(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = Tile(rows=rows, columns=columns, warps=4, stages=1)
    tiles = Tiles(forward=tile, query_gradient=tile, key_gradient=tile)
    for module in (query_block_kernel, key_block_kernel):
        monkeypatch.setattr(module, "tiles_of", lambda *_: tiles)
    assert_right(_case([0, 17, 150], [1, 3], 64, heads=2, kv_heads=1))


@pytest.mark.parametrize("wanted_programs", [1, 6, 10_000])
def test_cut_lists_of_readers_add_up(wanted_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query block reads block 0: one long list beside short ones."""
    monkeypatch.setattr(device_functions, "WANTED_PROGRAMS", wanted_programs)
    case = _case([0, 20, 190], [2, 2], 16, heads=2, kv_heads=2)
    indices_NGK = case.selection.indices_QCK.clone()
    indices_NGK[3:, :, 1] = 2
    assert_right(with_lists(case, indices_NGK, case.selection.counts_QC))


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    """A tile has up to 128 rows. Strides of a meta tensor need no memory."""
    for stride, copied in ((1 << 22, False), (1 << 24, True)):
        rows = torch.empty(200 << 24, device="meta").as_strided((200, 2, 64), (stride, 64, 1))
        dense = device_functions.with_dense_rows(rows)
        assert (dense.stride(0) == 128) == copied
        assert 128 * dense.stride(0) < 2**31


EVEN, ODD = range(0, 10, 2), range(1, 10, 2)


@pytest.mark.skipif(not INTERPRETED, reason="memory of the host")
def test_nothing_behind_the_last_list_is_touched() -> None:
    """It ends where memory does: the next page may not be read."""
    case = _case([0, 70], [2], 16, heads=2, kv_heads=1, head_dim=16)
    lists = case.selection.indices_QCK
    assert int(case.selection.counts_QC[-1, -1]) == lists.shape[2]
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE - 4 * lists.numel()
    guarded = torch.frombuffer(memory, dtype=torch.int32, count=lists.numel(), offset=offset)
    guarded = guarded.view(lists.shape).copy_(lists)
    ours = with_lists(case, guarded, case.selection.counts_QC).ours("triton", torch.float32)
    assert_identical(ours, case.ours("triton", torch.float32))


def test_a_scale_that_is_not_positive_is_refused() -> None:
    case = _case([0, 20], [1], 16)
    q, k, v = (x.to(DEVICE) for x in (case.q_THD, case.k_TGD, case.v_TGF))
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"softmax_scale .*: must be positive"):
            block_sparse_attention(
                q,
                k,
                v,
                on_device(case.selection, DEVICE),
                softmax_scale=scale,
                implementation="triton",
            )
