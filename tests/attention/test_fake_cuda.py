# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA tensors without a GPU: devices, waits of the host, copies, launches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention.cases import SCALE, saved
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sparsebalance_megatron.attention.api import kernel_named
from sparsebalance_megatron.attention.kernels.contract import Kernel
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.selector_registry import BUILT_IN

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from fake_cuda import CUDA, Launches, NoTraffic, fake_cuda  # noqa: E402


def _pass(selection: str, tokens: list[int], kernel: Kernel) -> list[Tensor]:
    blocks = packed_layout(tokens, 128, CUDA)
    inputs = [
        torch.empty(tokens[-1], heads, 128, dtype=torch.bfloat16, device=CUDA)
        for heads in (16, 4, 4)
    ]
    budgets_S = torch.empty(len(tokens) - 1, dtype=torch.int64, device=CUDA)
    selector = selector_named(selection)
    with NoTraffic():
        ranking = rank_sequence(
            selector, *inputs[:2], blocks, softmax_scale=SCALE, max_budget=8, observe=True
        )
        curves_SK = selector.coverage(ranking)
        selected = selector.select(ranking, budgets_S)
        out_THF, lse_TH = kernel.forward(*inputs, selected, softmax_scale=SCALE)
        # Autograd asks the driver for the device's stream, which needs a driver.
        known = saved(*inputs, out_THF, lse_TH, selected)
        gradients = kernel.backward(torch.empty_like(out_THF), known)
    return [curves_SK, out_THF, lse_TH, *gradients]


@pytest.mark.parametrize("tokens", [[0, 2000, 4096], [0, 100, 20000]], ids=["short", "long"])
@pytest.mark.parametrize("selection", sorted(BUILT_IN))
def test_nothing_waits_and_nothing_lies_elsewhere(selection: str, tokens: list[int]) -> None:
    launches = Launches()
    with fake_cuda(), launches.of_triton():
        results = _pass(selection, tokens, kernel_named("triton"))
    assert {x.device for x in results} == {CUDA}
    assert launches.by_triton


def test_selection_and_coverage_in_megatrons_core_attention() -> None:
    """Nothing but layouts and grids of budgets is copied."""
    options = AttentionOptions(
        SparseBalanceConfig(
            block_size=128,
            base_budget=8,
            selection="vertical-slash",
        ),
        (1, 2, 4),
    )
    attention = BudgetedCoreAttention(
        SimpleNamespace(kv_channels=128, num_layers=1, softmax_type="vanilla"),
        *(1, AttnMaskType.padding_causal, "self"),
        options=options,
    )
    with fake_cuda(), torch.no_grad():
        context = LocalMicroBatch(
            layout=packed_layout([0, 2000, 4096], 128, CUDA),
            budgets_LS=torch.empty(1, 2, dtype=torch.int32, device=CUDA),
            max_budgets=(8,),
            observe=True,
        )
        inputs = [
            torch.empty(4096, heads, 128, dtype=torch.bfloat16, device=CUDA) for heads in (16, 4)
        ]
        with NoTraffic():
            selected = attention.select(*inputs, context)
    assert {x.device for x in selected.tensors()} == {CUDA}
    assert context.observations
