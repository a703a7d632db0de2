# SPDX-License-Identifier: Apache-2.0
"""What a host's training loop switches on changes no result."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from attention.cases import SCALE
from torch import Tensor

from sparsebalance_megatron.attention import precision
from sparsebalance_megatron.attention.api import budgeted_attention, kernel_named
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.precision import warn_of_tf32
from sparsebalance_megatron.attention.selectors import SELECTORS

CU_SEQLENS = [0, 37, 139]
SERVING = [
    (name, implementation)
    for name, selector in SELECTORS.items()
    for implementation in ("tokens" if selector.by_token else "blocks", "reference")
]


def _qkv(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(139, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2)]


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_autocast_changes_no_bit(selection: str, implementation: str, dtype: torch.dtype) -> None:
    def run(context: contextlib.AbstractContextManager[object]) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in _qkv(dtype)]
        with context:
            out_THD, lse_TH = budgeted_attention(
                *leaves,
                CU_SEQLENS,
                2,
                block_size=16,
                softmax_scale=SCALE,
                selection=selection,
                implementation=implementation,
            )
            out_THD.float().square().sum().backward()
        return [out_THD.detach(), lse_TH, *(leaf.grad for leaf in leaves)]

    for inside, outside in zip(run(_autocast()), run(contextlib.nullcontext()), strict=True):
        assert inside.dtype == outside.dtype
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("selection", SELECTORS)
def test_autocast_leaves_scores_and_coverage_alone(selection: str) -> None:
    selector, layout = SELECTORS[selection], packed_layout(CU_SEQLENS, 16, "cpu")
    q_THD, k_TGD, _ = _qkv(torch.float32)
    outside = selector.scores(q_THD, k_TGD, layout, softmax_scale=SCALE)
    with _autocast():
        inside = selector.scores(q_THD, k_TGD, layout, softmax_scale=SCALE)
        curves_SK = selector.coverage(inside)
    assert torch.equal(inside.scores_QCJ, outside.scores_QCJ)
    assert torch.equal(curves_SK, selector.coverage(outside))


@pytest.mark.parametrize(("selection", "implementation"), SERVING)
def test_gradients_of_bfloat16_are_computed_in_float32(selection: str, implementation: str) -> None:
    """Every step of it: the result is rounded once, at the end."""
    selector, layout = SELECTORS[selection], packed_layout(CU_SEQLENS, 16, "cpu")
    q_THD, k_TGD, v_TGD = _qkv(torch.bfloat16)
    scores = selector.scores(q_THD, k_TGD, layout, softmax_scale=SCALE)
    lists = selector.select(scores, torch.tensor([2, 3]))
    kernel = kernel_named(implementation)
    out_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, lists, softmax_scale=SCALE)
    rounded = (q_THD.roll(1, 0), q_THD, k_TGD, v_TGD, out_THD)
    narrow = kernel.backward(*rounded, lse_TH, lists, softmax_scale=SCALE)
    wide = kernel.backward(*(x.float() for x in rounded), lse_TH, lists, softmax_scale=SCALE)
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("by_token", [False, True])
def test_coverage_of_a_long_document_rounds_once(by_token: bool) -> None:
    """Sums over many blocks are of float64."""
    layout = packed_layout([0, 1500], 2, "cpu")
    selector = SELECTORS["token-query-head" if by_token else "query-block-lookahead"]
    generator = torch.Generator().manual_seed(5)
    q_THD, k_TGD = (torch.randn(1500, 1, 16, generator=generator) for _ in range(2))
    scores = selector.scores(q_THD, k_TGD, layout, softmax_scale=SCALE)
    mass_QK = (scores.ranked[0][:, 0] * SCALE).softmax(-1).double()
    exact_K = mass_QK.mean(0).cumsum(0)
    ulp = 2.0**-24
    assert (selector.coverage(scores)[0].double() - exact_K).abs().max() <= 1.01 * ulp


@pytest.mark.parametrize(
    ("matmul", "warns"),
    [
        (SimpleNamespace(fp32_precision="tf32"), True),
        (SimpleNamespace(fp32_precision="ieee", allow_tf32=True), False),
        (SimpleNamespace(allow_tf32=True), True),
        (SimpleNamespace(allow_tf32=False), False),
    ],
)
def test_tf32_is_warned_of(
    matmul: SimpleNamespace, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(matmul=matmul)
    monkeypatch.setattr(precision.torch.backends, "cuda", cuda)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_tf32(torch.device("cuda"))
        assert len(seen) == warns
        warn_of_tf32(torch.device("cpu"))
        assert len(seen) == warns
