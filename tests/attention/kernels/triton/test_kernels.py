# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against float64: by Triton's interpreter on the CPU, compiled on a GPU.

Over blocks of queries, then over blocks and single columns, then over lists by token.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import (
    Case,
    assert_identical,
    assert_right,
    inputs_of,
    make_case,
    on_device,
    reselected,
    saved,
    with_columns,
    with_heads_far_apart,
    with_lists,
    with_random_columns,
)
from attention.kernels.triton.where import DEVICE, INTERPRETED, pytestmark  # noqa: F401
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.kernels import triton as implementation
from sparsebalance_megatron.attention.kernels.triton import (
    device_functions,
    index,
    key_block_kernel,
    query_block_kernel,
    token_kernels,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import Tile, Tiles
from sparsebalance_megatron.attention.selection import Selection


def _use_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    tile = Tile(rows=rows, columns=columns, warps=4, stages=1)
    tiles = Tiles(forward=tile, query_gradient=tile, key_gradient=tile)
    for module in (device_functions, query_block_kernel, key_block_kernel, token_kernels):
        monkeypatch.setattr(module, "tiles_of", lambda *_: tiles)


def _case(cu_seqlens: list[int], budgets: list[int], block: int = 16, **settings) -> Case:
    """Small, since the interpreter is slow."""
    defaults = {"head_dim": 16, "heads": 2, "kv_heads": 1}
    return make_case(cu_seqlens, budgets, block=block, device=DEVICE, **defaults | settings)


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
    assert_right(_case([0, 20, 97], [1, 2], 32, **dims, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 32), (64, 16), (128, 64)])
def test_tiles_smaller_and_larger_than_a_head_of_a_block(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_tiles(monkeypatch, rows, columns)
    assert_right(_case([0, 17, 150], [1, 3], 64, head_dim=64))


@pytest.mark.parametrize("wanted_programs", [1, 6, 10_000])
def test_cut_lists_of_readers_add_up(wanted_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query block reads block 0: one long list beside short ones."""
    monkeypatch.setattr(device_functions, "WANTED_PROGRAMS", wanted_programs)
    case = _case([0, 20, 190], [2, 2], head_dim=64, kv_heads=2)
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


def test_a_scale_that_is_not_positive_is_refused() -> None:
    case = _case([0, 20], [1])
    q, k, v = (x.to(DEVICE) for x in (case.q_THD, case.k_TGD, case.v_TGF))
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"softmax_scale .*: must be positive"):
            block_sparse_attention(
                *(q, k, v, on_device(case.selection, DEVICE)),
                softmax_scale=scale,
                implementation="triton",
            )


def _column_case(cu_seqlens: list[int], budgets: list[int], **settings) -> Case:
    return _case(cu_seqlens, budgets, kind="vertical-slash", **settings)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (64, 16), (32, 64)])
def test_lists_of_any_length_and_order(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones, others that fill no tile, a different one for each KV head; what lies past their
    end is no token's number."""
    _use_tiles(monkeypatch, rows, columns)
    case = _column_case([0, 1, 80], [1, 1], block=32, heads=4, kv_heads=2)
    case = with_random_columns(case, 45)
    assert case.selection.columns is not None
    counts_NG = case.selection.columns.counts_NG
    assert counts_NG.min() == 0 and counts_NG.max() > 32
    assert not torch.equal(counts_NG[:, 0], counts_NG[:, 1])
    assert_right(case)


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_chunks_of_partial_sums_add_up(chunk_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk reads the document's first tokens."""
    case = _column_case([0, 17, 96], [1, 3], kv_heads=2)
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
    case = with_random_columns(_column_case([0, 70], [2]), 40)
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


def test_columns_without_places_are_none() -> None:
    case = _column_case([0, 100], [3])
    columns = case.selection.columns
    assert columns is not None
    without = dataclasses.replace(case.selection, columns=None)
    expected = dataclasses.replace(case, selection=without).ours("triton", torch.float32)
    empty = with_columns(case, columns.tokens_NGK[..., :0], torch.zeros_like(columns.counts_NG))
    assert_identical(empty.ours("triton", torch.float32), expected)


BY_KV_HEAD, BY_QUERY_HEAD = "token-kv-head", "token-query-head"


def _popular(case: Case, block: int) -> Case:
    """Every later token of the block's document that reads two blocks reads this one."""
    layout = case.selection.query_layout
    indices_TCK = case.selection.indices_QCK.clone()
    later_T = layout.block_T > block
    assert (layout.document_N[layout.block_T[later_T]] == layout.document_N[block]).all()
    indices_TCK[later_T, :, 1] = block
    return with_lists(case, indices_TCK, case.selection.counts_QC)


@pytest.mark.parametrize("kind", [BY_KV_HEAD, BY_QUERY_HEAD])
def test_chunks_launches_and_cut_lists_add_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of 32 rows in launches of three, keys of half a block, a block that all read."""
    _use_tiles(monkeypatch, rows=16, columns=16)
    monkeypatch.setattr(index, "FEWEST_TILE_READERS", 8)
    monkeypatch.setattr(token_kernels, "WANTED_PROGRAMS", 1000)
    monkeypatch.setattr(token_kernels, "PARTIAL_BYTES", 3 * 32 * 18 * 4)
    monkeypatch.setattr(device_functions, "PART_BYTES", 8 << 13)
    case = _popular(_case([0, 100], [2], 32, heads=4, kv_heads=2, kind=kind), 0)
    launches: list[int] = []
    parts: list[int] = []
    kernel, invert = token_kernels._reader_kernel, device_functions.inverse_lists

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launches.append(*grid)
            return kernel[grid]

    def inverse(*args, **kwargs):
        found = invert(*args, **kwargs)
        parts.append(int(found.list_2U[0, : 2 * 4].max()))
        return found

    monkeypatch.setattr(token_kernels, "_reader_kernel", Counted())
    monkeypatch.setattr(device_functions, "inverse_lists", inverse)
    assert_right(case)
    # 14 programs in all, of the forward pass and of dq.
    assert launches == 2 * [3, 3, 3, 3, 2]
    assert min(parts) > 1


def test_a_group_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heads lie in two tiles."""
    _use_tiles(monkeypatch, rows=16, columns=16)
    assert_right(_case([0, 20], [2], heads=32, kind=BY_KV_HEAD))


def test_rows_too_many_for_31_bits_are_refused() -> None:
    """The row lies on the meta device, so that it needs no memory."""
    case = _case([0, 20], [2], kind=BY_KV_HEAD)
    lists_TCK = torch.empty(20, 1, 1 << 27, dtype=torch.int32, device="meta")
    selection = dataclasses.replace(case.selection, indices_QCK=lists_TCK)
    q_THD = case.q_THD.to(DEVICE)
    assert "too few for 20 rows" in str(implementation.obstacle(q_THD, q_THD, selection))
    assert implementation.obstacle(q_THD, q_THD, case.selection) is None


KINDS = ("previous-block", "token-kv-head", "vertical-slash")
every_kind = pytest.mark.parametrize("kind", KINDS)


def _attend(inputs: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv from q, k, v and dout, by the kernels themselves."""
    *qkv, dout = inputs
    results = implementation.forward(inputs_of(*qkv, selection))
    gradients = implementation.backward(dout, saved(*qkv, *results, selection))
    return tuple(x.cpu() for x in (*results, *gradients))


RESULTS = [
    ("token-kv-head", [0, 1, 2, 30, 71], [1, 3, 2, 3], {"heads": 3}),
    ("token-query-head", [0, 75], [2], {"block": 32, "head_dim": 64, "dtype": torch.float16}),
    ("token-kv-head", [0, 20, 97], [9, 9], {"block": 64, "head_dim": 128, "kv_heads": 2}),
    ("token-query-head", [0, 3, 5], [1, 2], {"block": 64, "head_dim": 80}),
    ("vertical-slash", [0, 130], [7], {"heads": 1}),
    ("vertical-slash", [0, 20, 90], [1, 3], {"heads": 3, "head_dim": 24}),
    ("previous-block", [0, 45], [2], {"heads": 16, "head_dim": 64}),
]

EIGHT_HEADS = {"heads": 8, "kv_heads": 2}
FULL_TILES = [
    pytest.param(
        *(kind, [0, 700, 701, 1500], [3, 1, 2]),
        {"block": block, "head_dim": dim, "value_dim": dim, "dtype": dtype, **EIGHT_HEADS},
        id=f"full_tiles-{kind}-{block}-{dim}-{dtype}",
    )
    for kind in ("previous-block", "token-kv-head", "token-query-head", "vertical-slash")
    for block in (64, 128, 256)
    for dim in (64, 96, 128)
    for dtype in (torch.bfloat16, torch.float16)
    if not INTERPRETED
]


@pytest.mark.parametrize(("kind", "cu_seqlens", "budgets", "how"), RESULTS + FULL_TILES)
def test_other_shapes_are_as_good_as_plain_torch(
    kind: str, cu_seqlens: list[int], budgets: list[int], how: dict[str, Any]
) -> None:
    """Heads, groups and blocks are those that the contract of all kernels does not ask for, lists
    those of the definition."""
    case = _case(cu_seqlens, budgets, kind=kind, **{"value_dim": 8} | how)
    if case.selection.columns is not None and INTERPRETED:
        assert torch.equal(case.mask_HTT, case.listed_HTT)
    assert_right(case, case.q_THD.dtype)


@every_kind
def test_results_repeat_and_later_tokens_change_no_bit(kind: str) -> None:
    """Token 69 lies inside a block; the loss is over what comes before it, so dq, dk and dv too."""
    token, results = 69, []
    for factor in (1.0, 1.0, -30.0):
        case = _case([0, 80], [3], kind=kind, value_dim=8)
        for x in (case.q_THD, case.k_TGD, case.v_TGF):
            x[token:] *= factor
        case.dout_THF[token:] = 0.0
        ours = reselected(case).ours("triton", torch.float32)
        results.append(tuple(x[:token] for x in ours))
    assert_identical(results[0], results[1])
    assert_identical(results[0], results[2])


@every_kind
def test_strided_inputs_are_read_in_place(kind: str) -> None:
    """Megatron's q, k and v are views of one projection; lists may be views as well."""
    case = _case([0, 70], [3], kind=kind, heads=4, kv_heads=2)
    q, k, v = (x.unflatten(1, (2, -1)).to(DEVICE) for x in (case.q_THD, case.k_TGD, case.v_TGF))
    mixed = torch.cat([q, k, v], dim=2)
    q, k, v = mixed[:, :, :2].flatten(1, 2), mixed[:, :, 2], mixed[:, :, 3]
    assert not k.is_contiguous()
    dout = case.dout_THF.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    selection = on_device(case.selection, DEVICE)
    lists = [
        x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x
        for x in selection.tensors()
    ]
    selection = selection.with_tensors(lists)
    assert_identical(_attend((q, k, v, dout), selection), case.ours("triton", torch.float32))


@pytest.mark.skipif(not INTERPRETED, reason="memory of the host")
@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("previous-block", 1), ("token-kv-head", 1), ("vertical-slash", 3)]
)
def test_heads_more_than_2_to_the_31_elements_apart(
    kind: str, kv_heads: int, tmp_path: Path
) -> None:
    """Those of the queries; those of the keys where there are as many."""
    how = {"kind": kind, "kv_heads": kv_heads, "value_dim": 8, "dtype": torch.float16}
    case = _case([0, 52], [3], heads=3, **how)
    near = [case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF]
    moved = 1 if kv_heads == 3 else 0
    far = [*near[:moved], with_heads_far_apart(near[moved], tmp_path / "x"), *near[moved + 1 :]]
    assert_identical(_attend(tuple(far), case.selection), _attend(tuple(near), case.selection))
