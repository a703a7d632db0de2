# SPDX-License-Identifier: Apache-2.0
"""What every implementation promises of every kind of list, Triton's kernels included.

Triton's run where they are interpreted (see test_triton_interpreted.py), or on a GPU. The others
compute in float64, and are exact. Results of a selection with columns are those of masked dense
attention under the mask of its definition.
"""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from attention.cases import (
    SCALE,
    SELECTORS,
    SERVING,
    Case,
    assert_as_good_as_plain,
    assert_exact,
    assert_identical,
    assert_right,
    compute_as_off_the_cpu,
    drawn,
    example_selector,
    make_case,
    on_device,
    reselected,
    with_columns,
    with_lists,
)
from attention.sequence.slices import local_selection, of_members, random_owners, slices_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.flash_attention_4 import emulate
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparsebalance_megatron.attention.api import (
    block_sparse_attention,
    budgeted_attention,
    dense_attention,
)
from sparsebalance_megatron.attention.kernels import tile_attention, tokens
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.selector_registry import BUILT_IN

TRITON: list[Any] = []
DEVICE = "cpu"
if importlib.util.find_spec("triton") is not None:
    # By another name: it marks what this module has under its own.
    from attention.kernels.triton.where import DEVICE
    from attention.kernels.triton.where import pytestmark as where_triton_runs

    TRITON = [
        pytest.param(kind, "triton", marks=where_triton_runs)
        for kind in ("previous-block", "token-kv-head", "vertical-slash")
    ]


@pytest.fixture(autouse=True)
def flash_attention_4_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any dtype, on tiles of half a block."""
    emulate(monkeypatch)


PAIRS = [pytest.param(*pair) for pair in [*SERVING, ("previous-block", "fa4")]] + TRITON
every_kind = pytest.mark.parametrize(("kind", "implementation"), PAIRS)
every_list_of_blocks = pytest.mark.parametrize(
    ("kind", "implementation"), [pair for pair in PAIRS if pair.values[0] != "vertical-slash"]
)
ODD: dict[str, Any] = {"block": 8, "head_dim": 8, "value_dim": 5}
CU_SEQLENS, BUDGETS, BLOCKS = [0, 1, 2, 30, 51, 111], [1, 3, 2, 3, 5], 10


def _case(
    kind: str,
    implementation: str,
    cu_seqlens: list[int] = CU_SEQLENS,
    budgets: list[int] = BUDGETS,
    **sizes: Any,
) -> Case:
    how: dict[str, Any] = {"block": 16, "head_dim": 16, "value_dim": 8}
    if implementation == "triton":
        # Few heads, since the interpreter is slow.
        how |= {"heads": 2, "kv_heads": 1, "device": DEVICE}
    return make_case(cu_seqlens, budgets, kind=kind, **how | sizes)


def _dtype(implementation: str) -> torch.dtype:
    return torch.float32 if implementation == "triton" else torch.float64


def _assert_right(case: Case, implementation: str, found: tuple[Tensor, ...]) -> None:
    """Float64 is exact, float32 as good as plain torch's."""
    if implementation == "triton":
        assert_as_good_as_plain(case, found, torch.float32, case.plain(torch.float64))
    else:
        assert_exact(found, case.plain(torch.float64))


def _spoilt_past_ends(case: Case) -> Case:
    """Past the ends of lists, and of columns, the largest number."""

    def spoilt(lists: Tensor, counts: Tensor) -> Tensor:
        past_end = torch.arange(lists.shape[2]) >= counts[..., None]
        return lists.masked_fill(past_end, torch.iinfo(lists.dtype).max)

    columns = case.selection.columns
    if columns is not None:
        case = with_columns(case, spoilt(columns.tokens_NGK, columns.counts_NG), columns.counts_NG)
    counts_QC = case.selection.counts_QC
    return with_lists(case, spoilt(case.selection.indices_QCK, counts_QC), counts_QC)


PACKINGS = {
    "own-block-only": ([0, 40], [1]),
    "odd-length": ([0, 37], [2]),
    "one-token-documents-mixed-budgets": ([0, 1, 2, 30, 51], [1, 3, 2, 3]),
    "everything": ([0, 21, 48], [9, 9]),
    "shorter-than-a-block": ([0, 3, 5, 6], [1, 2, 1]),
    "many-blocks": ([0, 1, 30, 111, 190], [1, 2, 3, 8]),
}


@st.composite
def _random_packings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Boundaries and budgets."""
    lengths = draw(st.lists(st.integers(1, 45), min_size=1, max_size=4))
    budgets = draw(st.lists(st.integers(1, 7), min_size=len(lengths), max_size=len(lengths)))
    return [0, *torch.tensor(lengths).cumsum(0).tolist()], budgets


@pytest.mark.parametrize(("kind", "implementation"), SERVING)
@given(packing=_random_packings(), kv_heads=st.sampled_from([1, 2, 4]))
@settings(max_examples=12)
def test_float64_is_exact(
    kind: str, implementation: str, packing: tuple[list[int], list[int]], kv_heads: int
) -> None:
    """Lists are those of the definition."""
    case = _case(kind, implementation, *packing, kv_heads=kv_heads, **ODD)
    assert_exact(case.ours(implementation, torch.float64), case.exact())


@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("kind", "implementation"), [*SERVING, *TRITON])
def test_training_precision_is_as_good_as_plain_torch(
    kind: str,
    implementation: str,
    packing: str,
    off_the_cpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels compute as on the CPU, and as on other devices, in both precisions in turn."""
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    how: dict[str, Any] = {} if implementation == "triton" else ODD
    # Triton's interpreter cannot multiply bfloat16.
    low = torch.float16 if implementation == "triton" else torch.bfloat16
    how |= {"dtype": (torch.float32, low)[(list(PACKINGS).index(packing) + off_the_cpu) % 2]}
    case = _case(kind, implementation, *PACKINGS[packing], **how)
    assert_right(case, case.q_THD.dtype, implementation)


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize(
    ("scores_at_once", "tile_rows", "places_at_once"),
    [(1, 1, 8), (700, 6, 1), (3000, 16, 2), (3000, 768, 3)],
)
def test_results_do_not_depend_on_what_is_computed_at_once(
    kind: str,
    off_the_cpu: bool,
    scores_at_once: int,
    tile_rows: int,
    places_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also as many tiles of tokens as there may be at most, where the host does not read."""
    case = _case(kind, "auto", [0, 13, 60], [3, 4], **ODD)
    whole = case.ours("auto", torch.float64)
    monkeypatch.setattr(tile_attention, "_SCORES_AT_ONCE", scores_at_once)
    monkeypatch.setattr(tokens, "_TILE_ROWS", (tile_rows,))
    monkeypatch.setattr(tokens, "_PLACES_AT_ONCE", places_at_once)
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    assert_exact(case.ours("auto", torch.float64), whole)


@pytest.mark.parametrize("reentrant", [False, True])
@every_kind
def test_recomputed_passes_repeat_every_bit_and_leave_inputs_alone(
    kind: str, implementation: str, reentrant: bool
) -> None:
    case = _case(kind, implementation, [0, 30, 51], [3, 2])
    copies = [x.clone() for x in (case.q_THD, case.k_TGD, case.v_TGF)]
    selection = on_device(case.selection, case.device)

    def attend(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        how = {"softmax_scale": SCALE, "implementation": implementation}
        out, lse = block_sparse_attention(*qkv, selection, **how)
        assert not lse.requires_grad
        return out, lse

    def recompute(*qkv: Tensor) -> Any:
        return checkpoint(attend, *qkv, use_reentrant=reentrant)

    both = (case.run(function, torch.float32, case.device) for function in (attend, recompute))
    assert_identical(*both)
    for x, copy in zip((case.q_THD, case.k_TGD, case.v_TGF), copies, strict=True):
        assert torch.equal(x, copy)


OWNERS = {
    "short blocks": [0, 0, 1, 1, 2, 1, 2, 2, 1, 1],
    "two in turn": [0, 1] * 5,
    "random": random_owners(BLOCKS, 3, 1).tolist(),
    "five": random_owners(BLOCKS, 5, 2).tolist(),
}
"""Which member of a context group holds each block: one holds only blocks of a token."""


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@every_kind
def test_parts_of_members_add_up_to_the_whole(
    kind: str, implementation: str, owners: list[int]
) -> None:
    """Queries of one member, and keys and values of all, head by head; past a list's end no block's
    number."""
    case, members = _spoilt_past_ends(_case(kind, implementation)), 1 + max(owners)
    slices = slices_of(CU_SEQLENS, np.array(owners), members, block=16)
    assert slices[0].whole_layout.blocks == BLOCKS
    found = of_members(case, implementation, _dtype(implementation), slices)
    _assert_right(case, implementation, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_lose_no_precision(dtype: torch.dtype) -> None:
    """Sums over parts are made in float32: the error is that of the inputs' dtype."""
    how = {"block": 16, "head_dim": 8, "kind": "token-kv-head", "dtype": dtype}
    case = make_case(CU_SEQLENS, BUDGETS, **how)
    slices = slices_of(CU_SEQLENS, np.array(OWNERS["five"]), 5, block=16)
    found = of_members(case, "tokens", dtype, slices)
    assert_as_good_as_plain(case, found, dtype, case.plain(torch.float64))


@pytest.mark.parametrize("off_the_cpu", [False, True])
@every_kind
def test_queries_of_some_blocks_get_their_rows_of_the_whole(
    kind: str, implementation: str, off_the_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, through the public call; as computed on the CPU and elsewhere."""
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    case = _case(kind, implementation)
    held = slices_of(CU_SEQLENS, np.array(OWNERS["random"]), 3, block=16)[0]
    rows = held.tokens_T
    case.dout_THF[np.setdiff1d(np.arange(CU_SEQLENS[-1]), rows)] = 0.0
    part = dataclasses.replace(
        case,
        q_THD=case.q_THD[rows],
        dout_THF=case.dout_THF[rows],
        selection=local_selection(case.selection, held),
    )
    *of_rows, dk, dv = part.ours(implementation, _dtype(implementation))
    # All other rows are those of the yardstick.
    filled = [x.to(some.dtype) for x, some in zip(case.plain(torch.float64), of_rows, strict=False)]
    for whole, some in zip(filled, of_rows, strict=True):
        whole[rows] = some
    _assert_right(case, implementation, (*filled, dk, dv))


@pytest.mark.parametrize("spoilt", ["nan", "inf", "-inf", "everything"])
@every_kind
def test_bad_numbers_of_a_document_stay_in_it(kind: str, implementation: str, spoilt: str) -> None:
    """It lies between two others, and its last block is short, so that its own blocks must be
    read as such: the list comes from the bad numbers."""
    clean = _case(kind, implementation, [0, 20, 86, 115], [2, 3, 2])
    names = ("q_THD", "k_TGD", "v_TGF", "dout_THF")
    copies = {name: getattr(clean, name).clone() for name in names}
    if spoilt == "everything":
        for x in copies.values():
            x[20:86] = torch.nan
    else:
        for x in list(copies.values())[:3]:
            x[[20, 85], 0, 3] = float(spoilt)
    broken = reselected(dataclasses.replace(clean, **copies))
    found, expected = (case.ours(implementation, torch.float32) for case in (broken, clean))
    assert not found[0][20:86].isfinite().all()
    elsewhere = torch.cat((torch.arange(20), torch.arange(86, 115)))
    assert_identical(*(tuple(x[elsewhere] for x in results) for results in (found, expected)))


@every_kind
def test_a_document_of_nan_stays_alone_in_parts(kind: str, implementation: str) -> None:
    case = _case(kind, implementation)
    slices = slices_of(CU_SEQLENS, np.array(OWNERS["two in turn"]), 2, block=16)
    clean = of_members(case, implementation, torch.float32, slices)
    for x in (case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF):
        x[CU_SEQLENS[2] : CU_SEQLENS[3]] = torch.nan
    dirty = of_members(case, implementation, torch.float32, slices)
    for a, b in zip(dirty, clean, strict=True):
        assert a[: CU_SEQLENS[2]].equal(b[: CU_SEQLENS[2]])
        assert a[CU_SEQLENS[3] :].equal(b[CU_SEQLENS[3] :])
        assert a[CU_SEQLENS[2] : CU_SEQLENS[3]].isnan().any()


@pytest.mark.parametrize("off_the_cpu", [False, True])
@every_list_of_blocks
def test_a_query_without_keys_gives_zero_and_finite_gradients(
    kind: str, implementation: str, off_the_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    case = _case(kind, implementation, [0, 80], [3])
    counts_QC = case.selection.counts_QC.clone()
    counts_QC[slice(32, 48) if case.selection.by_token else 2] = 0
    changed = with_lists(case, case.selection.indices_QCK, counts_QC)
    out, lse, *gradients = ours = changed.ours(implementation, torch.float32)
    assert (out[32:48] == 0).all()
    assert (lse[32:48] == -torch.inf).all()
    assert (gradients[0][32:48] == 0).all()
    for a, b in zip(ours, changed.ours("reference", torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@every_kind
def test_what_lies_past_a_list_is_not_read(kind: str, implementation: str) -> None:
    case = _case(kind, implementation, [0, 1, 30, 190], [1, 2, 8])
    changed = _spoilt_past_ends(case)
    assert not changed.selection.indices_QCK.equal(case.selection.indices_QCK)
    assert_identical(*(one.ours(implementation, torch.float32) for one in (case, changed)))


@every_kind
def test_large_scores_stay_finite(kind: str, implementation: str) -> None:
    case = _case(kind, implementation, [0, 50], [3])
    case = dataclasses.replace(case, q_THD=case.q_THD * 100)
    ours = case.ours(implementation, torch.float32)
    slices = slices_of([0, 50], np.array([0, 1, 0, 1]), 2, block=16)
    parts = of_members(case, implementation, torch.float32, slices)
    for found in (ours, parts):
        assert all(x.isfinite().all() for x in found)
        assert_as_good_as_plain(case, found, torch.float32, case.plain(torch.float64))


BLOCK = 32
EVERY_SELECTOR = SELECTORS | {"quest": example_selector()}
LONGER_CU_SEQLENS = [0, 40, 460]
CHANGED = (1, 41, 72, 200, 331, 459)
"""Tokens inside, at the beginning and at the end of blocks. The long document, which begins at 40,
is longer than one tile of queries of any of torch's sizes up to 64."""
EVERY_PAIR = [*SERVING, ("quest", "tokens"), ("quest", "reference"), ("everything", "dense")]


def _before(
    token: int, selection: str, implementation: str, *, changed: bool = False
) -> list[Tensor]:
    """Outputs before a token, which may hold other numbers, and gradients of a loss over them:
    out, lse, dq, dk, dv."""
    leaves = [2.0 * x for x in drawn(460, 4, 2, 2, head_dim=16)]
    for x in leaves:
        x[token] = -30.0 * x[token] + 5.0 if changed else x[token]
        x.requires_grad_()
    if implementation == "dense":
        layout = packed_layout(LONGER_CU_SEQLENS, BLOCK, "cpu")
        out_THD, lse_TH = dense_attention(*leaves, layout, softmax_scale=SCALE)
    else:
        out_THD, lse_TH = budgeted_attention(
            *(*leaves, LONGER_CU_SEQLENS, 3),
            block_size=BLOCK,
            softmax_scale=SCALE,
            selection=EVERY_SELECTOR[selection],
            implementation=implementation,
        )
    out_THD[:token].square().sum().backward()
    return [x.detach()[:token] for x in (out_THD, lse_TH, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize(("selection", "implementation"), EVERY_PAIR)
def test_later_tokens_change_no_bit(selection: str, implementation: str) -> None:
    for token in CHANGED:
        where = token, selection, implementation
        assert_identical(_before(*where), _before(*where, changed=True))
