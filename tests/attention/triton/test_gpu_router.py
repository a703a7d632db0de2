# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of the router's kernels: long sequences, no compilation, no waiting."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.select.ranking import Ranking
from sparsebalance_megatron.config import Router

triton = pytest.importorskip("triton")
from sparsebalance_megatron.attention.select import router_kernels  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted"),
]
BLOCK, HEAD_DIM = 64, 128
SELECTIONS = ["token-query-head", "token-kv-head", "previous-block"]


def _integers(tokens: int, heads: int, seed: int) -> Tensor:
    """Scores of small integers are exact in whatever order they are summed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (tokens, heads, HEAD_DIM)
    return torch.randint(-8, 9, shape, generator=generator, device="cuda").bfloat16()


def _ranked(
    selection: str,
    cu_seqlens: list[int],
    router: Router,
    *,
    max_budget: int = 20,
    observe: bool = True,
) -> Ranking:
    tokens = cu_seqlens[-1]
    return rank_sequence(
        dataclasses.replace(selector_named(selection), router=router),
        *(_integers(tokens, 8, 0), _integers(tokens, 2, 1)),
        packed_layout(cu_seqlens, BLOCK, "cuda"),
        softmax_scale=0.001,
        max_budget=max_budget,
        observe=observe,
    )


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("cu_seqlens", [[0, 100, 2000, 2001, 9000], [0, 60_000], [0, 1024 * BLOCK]])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_both_routers_rank_alike(selection: str, cu_seqlens: list[int], observe: bool) -> None:
    """Up to 1,024 blocks, of which four warps sort a row."""
    kernel, plain = (
        _ranked(selection, cu_seqlens, router, observe=observe) for router in ("triton", "torch")
    )
    # Means of 64 integers have six bits behind the point, and bfloat16 rounds them alike.
    assert torch.equal(kernel.indices_QCK, plain.indices_QCK)
    if observe:
        torch.testing.assert_close(kernel.mass_SK, plain.mass_SK, rtol=1e-5, atol=1e-4)


def test_auto_takes_the_kernels_and_results_repeat() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again, named = (
            _ranked("token-query-head", [0, 5000], router) for router in ("auto", "auto", "triton")
        )
    for other in (again, named):
        assert torch.equal(first.indices_QCK, other.indices_QCK)
        assert torch.equal(first.mass_SK, other.mass_SK)


def test_lengths_and_budgets_of_one_power_of_two_compile_nothing() -> None:
    def compiled() -> int:
        kernels = (router_kernels._mean_kernel, router_kernels._rank_kernel)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    _ranked("token-kv-head", [0, 64 * BLOCK], "triton")
    before = compiled()
    assert before > 0
    for cu_seqlens, budget in (([0, 3000], 3), ([0, 1, 2101], 64), ([0, 33 * BLOCK - 5], 1)):
        _ranked("token-kv-head", cu_seqlens, "triton", max_budget=budget)
    assert compiled() == before


@pytest.mark.parametrize("selection", SELECTIONS)
def test_ranking_does_not_wait_for_the_device(selection: str) -> None:
    inputs = _integers(8192, 8, 0), _integers(8192, 2, 1)
    layout = packed_layout([0, 3000, 8192], BLOCK, "cuda")
    selector = dataclasses.replace(selector_named(selection), router="triton")
    how = {"softmax_scale": 0.001, "max_budget": 8, "observe": True}
    rank_sequence(selector, *inputs, layout, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        selector.coverage(rank_sequence(selector, *inputs, layout, **how))
    finally:
        torch.cuda.set_sync_debug_mode("default")
