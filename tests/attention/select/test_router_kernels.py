# SPDX-License-Identifier: Apache-2.0
"""The router's kernels against torch, in Triton's interpreter or on a GPU, through
``rank_sequence``.

Inputs are small integers, so that every score is exact in whatever order it is summed, and many
are equal.
"""

import dataclasses
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from attention.cases import ranked
from attention.kernels.triton.where import DEVICE, pytestmark  # noqa: F401
from attention.sequence.slices import random_owners, slices_of
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import router_kernels, selector_named
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.select.ranking import Ranking
from sparsebalance_megatron.attention.select.router_kernels import pooled_means
from sparsebalance_megatron.attention.select.summaries import block_means
from sparsebalance_megatron.config import Router

BLOCK = 8

SELECTIONS = ["token-query-head", "token-kv-head", "previous-block"]
ROUTERS: tuple[Router, Router] = ("triton", "torch")
LONG = [
    ([0, 100, 2000, 2001, 8000], 20, 1, torch.bfloat16),
    ([0, 1024 * BLOCK], 20, 1, torch.bfloat16),
]
"""Up to 1,024 blocks, of which four warps sort a row."""


def _integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(DEVICE, dtype)


def _inputs(tokens: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    return _integers((tokens, heads, 16), tokens), _integers((tokens, kv_heads, 16), tokens + 1)


def _selector(selection: str, router: Router, first_blocks: int | None = None) -> BlockTopK:
    selector = selector_named(selection, first_blocks=first_blocks)
    assert isinstance(selector, BlockTopK)
    return dataclasses.replace(selector, router=router)


def _ranked(
    selection: str,
    router: Router,
    inputs: tuple[Tensor, Tensor],
    layout: PackedLayout,
    *,
    softmax_scale: float = 0.02,
    first_blocks: int | None = None,
    **options: Any,
) -> Ranking:
    selector = _selector(selection, router, first_blocks)
    return ranked(selector, inputs, layout, softmax_scale=softmax_scale, **options)


def _assert_same(kernel: Ranking, plain: Ranking) -> None:
    """Mass: a softmax in float32 rounds each share by a few units in the last place."""
    assert torch.equal(kernel.indices_QCK, plain.indices_QCK)
    assert (kernel.mass_SK is None) == (plain.mass_SK is None)
    if kernel.mass_SK is not None:
        torch.testing.assert_close(
            kernel.mass_SK, plain.mass_SK, rtol=1e-5, atol=1e-5, equal_nan=True
        )


def _as_by_torch(
    selection: str, inputs: tuple[Tensor, Tensor], layout: PackedLayout, **options: Any
) -> Ranking:
    """What the kernels rank, which torch ranks alike."""
    kernel, plain = (_ranked(selection, router, inputs, layout, **options) for router in ROUTERS)
    _assert_same(kernel, plain)
    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cu_seqlens", [[0, 61], [0, 1, 20, 51, 59]])
def test_means_are_the_same(cu_seqlens: list[int], dtype: torch.dtype) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, DEVICE)
    x_THD = _integers((layout.tokens, 3, 20), 0, dtype)
    found = pooled_means(x_THD[:, 1:], layout)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, block_means(x_THD[:, 1:], layout))


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize(
    ("cu_seqlens", "max_budget", "first_blocks", "dtype"),
    [
        ([0, 53], 3, 0, torch.float32),
        ([0, 53], 3, 1, torch.float32),
        ([0, 21, 29, 70, 71], 17, 3, torch.bfloat16),
        ([0, 1], 1, 1, torch.float16),
        *(LONG if DEVICE == "cuda" else ()),
    ],
)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_lists_and_mass_are_those_of_torch(
    selection: str,
    cu_seqlens: list[int],
    max_budget: int,
    first_blocks: int,
    dtype: torch.dtype,
    observe: bool,
) -> None:
    layout = packed_layout(cu_seqlens, BLOCK, DEVICE)
    q_THD, k_TGD = (x.to(dtype) for x in _inputs(layout.tokens))
    how = {"max_budget": max_budget, "observe": observe, "first_blocks": first_blocks}
    _as_by_torch(selection, (q_THD, k_TGD), layout, **how)


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_program_takes_many_blocks_and_some_of_the_heads(
    selection: str, observe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several documents; products of 16 rows and columns; rows sorted a few at a time."""
    for name, value in {"PROGRAMS": 3, "_SCORE_ROWS": 16, "_SCORE_COLUMNS": 16}.items():
        monkeypatch.setattr(router_kernels, name, value)
    monkeypatch.setattr(router_kernels, "KEYS_OF_A_WARP", 32)
    layout = packed_layout([0, 3, 14, 17, 160], BLOCK, DEVICE)
    _as_by_torch(selection, _inputs(160), layout, max_budget=3, observe=observe)


@pytest.mark.parametrize("max_budget", [1, 5, 8, 20])
def test_long_rows_are_cut_into_runs(max_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 blocks: 32 columns, of which 4, 8 or all are sorted."""
    monkeypatch.setattr(router_kernels, "FEWEST_COLUMNS", 4)
    layout = packed_layout([0, 20 * BLOCK], BLOCK, DEVICE)
    inputs = _inputs(layout.tokens, 1, 1)
    _as_by_torch("previous-block", inputs, layout, max_budget=max_budget, observe=False)


def test_mass_of_real_numbers_is_as_exact_as_torchs() -> None:
    """Against a softmax in float64 that is sorted whole."""
    blocks = 20
    layout = packed_layout([0, blocks * BLOCK], BLOCK, DEVICE)
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD = (
        torch.randn(layout.tokens, 1, 16, generator=generator).to(DEVICE) for _ in range(2)
    )
    keys_NGD = k_TGD.double().unflatten(0, (blocks, BLOCK)).mean(1)
    scores_GNN = torch.einsum("ngd,mgd->gnm", q_THD[::BLOCK].double(), keys_NGD) * 3.0
    own_NN = torch.eye(blocks, device=DEVICE).bool()
    mass_GNN = scores_GNN.masked_fill(own_NN.cumsum(0) == 0, -torch.inf).softmax(-1)
    others_GNN = mass_GNN.masked_fill(own_NN, 0.0).sort(-1, descending=True).values
    own_GN1 = mass_GNN.diagonal(dim1=1, dim2=2)[:, :, None]
    expected_K = BLOCK * torch.cat([own_GN1, others_GNN[:, :, :-1]], -1).sum((0, 1))
    errors = []
    for router in ROUTERS:
        options = {"max_budget": 4, "observe": True, "softmax_scale": 3.0}
        mass_SK = _ranked("previous-block", router, (q_THD, k_TGD), layout, **options).mass_SK
        assert mass_SK is not None
        errors.append(float((mass_SK[0] - expected_K).abs().max()))
    few_roundings = 8 * torch.finfo(torch.float32).eps * float(expected_K.max())
    assert errors[0] <= 2 * errors[1] + few_roundings


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_bad_numbers_are_ranked_as_in_torch(selection: str, value: float) -> None:
    layout = packed_layout([0, 13, 66, 77], BLOCK, DEVICE)
    q_THD, k_TGD = _inputs(77)
    for x, token in itertools.product((q_THD, k_TGD), (25, 41)):
        x[token, 0, 3] = value
    mass_SK = _as_by_torch(selection, (q_THD, k_TGD), layout, max_budget=7, observe=True).mass_SK
    assert mass_SK is not None
    assert mass_SK[1].isnan().all()
    assert mass_SK[[0, 2]].isfinite().all()


def test_ties_go_to_the_lower_block() -> None:
    layout = packed_layout([0, 80], BLOCK, DEVICE)
    q_THD, k_TGD = (torch.zeros(80, 1, 16, device=DEVICE) for _ in range(2))
    k_TGD[40:] = -0.0
    ranking = _ranked(
        "token-kv-head", "triton", (q_THD, k_TGD), layout, max_budget=4, observe=False
    )
    assert ranking.indices_QCK[9 * BLOCK, 0].tolist() == [9, 0, 1, 2]


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_queries_of_some_blocks_rank_as_in_torch(selection: str, observe: bool) -> None:
    """A member of a context group."""
    cu_seqlens = [0, 21, 29, 70, 107]
    held = slices_of(cu_seqlens, random_owners(15, 3, 0), 3, BLOCK, DEVICE)[1]
    q_THD, k_TGD = _inputs(107)
    kernel, plain = (
        selector.rank(
            q_THD[held.tokens_T],
            selector.summaries(q_THD, k_TGD, held.whole_layout),
            held.layouts,
            softmax_scale=0.02,
            max_budget=3,
            observe=observe,
        )
        for selector in (_selector(selection, router) for router in ROUTERS)
    )
    _assert_same(kernel, plain)


def test_programs_take_as_many_keys_as_their_threads_hold() -> None:
    for columns, places, observe in itertools.product((1, 16, 17, 1024), (1, 64, 1000), (0, 1)):
        shape = router_kernels.launch_shape(columns, places, observe=bool(observe))
        assert shape["TAKEN"] <= shape["COLUMNS"] < 2 * max(columns, 16)
        assert shape["TAKEN"] >= (columns if observe else min(columns, places))
        assert shape["TILE_ROWS"] * shape["COLUMNS"] <= 8 * 32 * shape["num_warps"]


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels are interpreted")
def test_auto_takes_the_kernels_and_results_repeat() -> None:
    layout = packed_layout([0, 5000], BLOCK, DEVICE)
    how = {"max_budget": 20, "observe": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, *others = (
            _ranked("token-query-head", router, _inputs(5000), layout, **how)
            for router in ("auto", "auto", "triton")
        )
    for other in others:
        assert torch.equal(first.indices_QCK, other.indices_QCK)
        assert torch.equal(first.mass_SK, other.mass_SK)


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels are interpreted")
def test_lengths_and_budgets_of_one_power_of_two_compile_nothing() -> None:
    def compiled() -> int:
        kernels = (router_kernels._mean_kernel, router_kernels._rank_kernel)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def rank(cu_seqlens: list[int], max_budget: int) -> None:
        layout = packed_layout(cu_seqlens, BLOCK, DEVICE)
        inputs = _inputs(layout.tokens)
        _ranked("token-kv-head", "triton", inputs, layout, max_budget=max_budget, observe=True)

    rank([0, 64 * BLOCK], 20)
    before = compiled()
    assert before > 0
    for cu_seqlens, budget in (([0, 375], 3), ([0, 1, 263], 64), ([0, 33 * BLOCK - 5], 1)):
        rank(cu_seqlens, budget)
    assert compiled() == before
