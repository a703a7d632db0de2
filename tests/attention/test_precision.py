# SPDX-License-Identifier: Apache-2.0
"""What a host's training loop switches on changes no result."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention.cases import SCALE, SERVING, drawn, inputs_of, ranked, saved
from fake_cuda import CUDA, Launches, fake_cuda
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsebalance_megatron.attention.api import KERNELS, budgeted_attention
from sparsebalance_megatron.attention.device import exact_product
from sparsebalance_megatron.attention.kernels.contract import Attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import selector_named

CU_SEQLENS = [0, 37, 139]


def _qkv(dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) for x in drawn(139, 4, 2, 2, head_dim=16)]


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_autocast_changes_no_bit(selection: str, implementation: str, dtype: torch.dtype) -> None:
    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in _qkv(dtype)]
        with context:
            out_THF, lse_TH = budgeted_attention(
                *leaves,
                CU_SEQLENS,
                2,
                block_size=16,
                softmax_scale=SCALE,
                selection=selection,
                implementation=implementation,
            )
            out_THF.float().square().sum().backward()
            ranking = _ranking(selection, *leaves[:2])
            curves_SK = selector_named(selection).coverage(ranking)
        results = out_THF.detach(), lse_TH, *(leaf.grad for leaf in leaves)
        return [*results, ranking.indices_QCK, ranking.mass_SK, curves_SK]

    for inside, outside in zip(run(_autocast()), run(contextlib.nullcontext()), strict=True):
        assert inside.dtype == outside.dtype
        assert torch.equal(inside, outside)


class _Seen(TorchFunctionMode):
    """Names of the operations that a mode is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_modes_of_the_host_see_none_of_the_kernels_operations(
    selection: str, implementation: str
) -> None:
    q_THD, k_TGD, v_TGF = _qkv(torch.float32)
    lists = selector_named(selection).select(
        _ranking(selection, q_THD, k_TGD), torch.tensor([2, 3])
    )
    kernel, dout_THF = KERNELS[implementation], torch.ones(139, 4, 16)
    q_THD.requires_grad_()
    with _Seen() as seen:
        out_THF, _ = Attention.apply(q_THD, k_TGD, v_TGF, None, lists, SCALE, kernel)
        torch.autograd.grad(out_THF, q_THD, dout_THF)
    # The mode is asked about what surrounds the operation alone.
    assert seen.names == {"__get__", "grad"}


def _ranking(selection: str, q_THD: Tensor, k_TGD: Tensor) -> Any:
    layout = packed_layout(CU_SEQLENS, 16, "cpu")
    return ranked(selector_named(selection), [q_THD, k_TGD], layout, max_budget=3, observe=True)


@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_gradients_of_bfloat16_are_computed_in_float32(selection: str, implementation: str) -> None:
    """Every step of it: the result is rounded once, at the end."""
    selector = selector_named(selection)
    q_THD, k_TGD, v_TGF = _qkv(torch.bfloat16)
    lists = selector.select(_ranking(selection, q_THD, k_TGD), torch.tensor([2, 3]))
    kernel = KERNELS[implementation]
    out_THF, lse_TH = kernel.forward(inputs_of(q_THD, k_TGD, v_TGF, lists))
    rounded = (q_THD.roll(1, 0), q_THD, k_TGD, v_TGF, out_THF)
    narrow = kernel.backward(rounded[0], saved(*rounded[1:], lse_TH, lists))
    dout_THF, *floats = (x.float() for x in rounded)
    wide = kernel.backward(dout_THF, saved(*floats, lse_TH, lists))
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_mass_of_a_long_document_is_summed_in_float64(selection: str) -> None:
    """Queries of zero give every one of n visible blocks 1 / n, rounded to float32 once: beside
    that, sums over heads, tokens and chunks are exact to float64's rounding."""
    tokens, block, heads = 6000, 40, 3
    (k_THD,) = drawn(tokens, heads, head_dim=4)
    layout, qk = packed_layout([0, tokens], block, "cpu"), [torch.zeros_like(k_THD), k_THD]
    ranking = ranked(selector_named(selection), qk, layout, max_budget=1, observe=True)
    visible_N = torch.arange(1, tokens // block + 1)
    share_N = (1.0 / visible_N.float()).double() * block * heads
    place_KN = visible_N[:, None] <= visible_N
    exact_K = (place_KN * share_N).sum(1)
    torch.testing.assert_close(ranking.mass_SK[0], exact_K, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("matmul", "is_on"),
    [
        (SimpleNamespace(fp32_precision="tf32"), True),
        (SimpleNamespace(fp32_precision="ieee", allow_tf32=True), False),
        (SimpleNamespace(allow_tf32=True), True),
        (SimpleNamespace(allow_tf32=False), False),
    ],
)
def test_products_are_taken_in_float64_where_tf32_is_on(
    matmul: SimpleNamespace, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=matmul))
    with fake_cuda(), Launches() as launches:
        product = exact_product(*torch.empty(2, 4, 4, device=CUDA))
    assert product.dtype == torch.float32
    assert launches.counted["aten::_to_copy"] == (3 if is_on else 0)
