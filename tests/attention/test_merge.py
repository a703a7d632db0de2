# SPDX-License-Identifier: Apache-2.0
"""Merged partial attentions equal attention over the union."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import merge_partials


def _attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
    logits_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD)
    out_THD = torch.einsum("hqk,khd->qhd", logits_HTT.softmax(-1), v_THD)
    return out_THD, logits_HTT.logsumexp(-1).t()


def _leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, 2, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for tokens in (6, 9, 9)
    ]


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("magnitude", [1.0, 1e3])
def test_merge_is_the_union(split: int, magnitude: float) -> None:
    q_THD, k_THD, v_THD = _leaves()
    query = q_THD * magnitude
    union = _attend(query, k_THD, v_THD)
    merged = merge_partials(
        *_attend(query, k_THD[:split], v_THD[:split]), *_attend(query, k_THD[split:], v_THD[split:])
    )
    for a, b in zip(merged, union, strict=True):
        torch.testing.assert_close(a, b)
    for index in range(2):
        expected = torch.autograd.grad(
            union[index].square().sum(), (q_THD, k_THD), retain_graph=True
        )
        got = torch.autograd.grad(merged[index].square().sum(), (q_THD, k_THD), retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_an_empty_part_changes_nothing() -> None:
    out_THD, lse_TH = (x.detach() for x in _attend(*_leaves()))
    empty = torch.zeros_like(out_THD), torch.full_like(lse_TH, -torch.inf)
    for merged in (
        merge_partials(out_THD, lse_TH, *empty),
        merge_partials(*empty, out_THD, lse_TH),
    ):
        assert torch.equal(merged[0], out_THD)
        assert torch.equal(merged[1], lse_TH)


def test_two_empty_parts_stay_empty_with_finite_gradients() -> None:
    out_THD = torch.zeros(3, 2, 4, requires_grad=True)
    lse_TH = torch.full((3, 2), -torch.inf, requires_grad=True)
    merged_out, merged_lse = merge_partials(out_THD, lse_TH, out_THD, lse_TH)
    assert (merged_out == 0).all()
    assert (merged_lse == -torch.inf).all()
    (merged_out.sum() + merged_lse.masked_fill(merged_lse == -torch.inf, 0.0).sum()).backward()
    assert out_THD.grad.isfinite().all()
    assert lse_TH.grad.isfinite().all()


def test_low_precision_outputs_keep_their_dtype() -> None:
    out_THD, lse_TH = torch.ones(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1)
    merged_out, merged_lse = merge_partials(out_THD, lse_TH, 3 * out_THD, lse_TH)
    assert merged_out.dtype == torch.bfloat16
    assert merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged_out, 2 * out_THD)
