# SPDX-License-Identifier: Apache-2.0
"""How many kernels a layer of the default selection launches, and what it keeps in memory.

Counted on fake CUDA tensors: router, coverage, cut and attention of one core attention. An
operation of torch that is no view and no allocation counts once, though some launch several.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention.cases import SCALE, saved
from megatron.core.transformer.enums import AttnMaskType

from sparsebalance_megatron.attention.kernels import dense
from sparsebalance_megatron.attention.kernels.contract import Kernel
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select.vertical_slash import VERTICAL_SLASH
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import DEFAULT_SELECTION, SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from fake_cuda import CUDA, Launches, NoTraffic, PeakMemory, fake_cuda  # noqa: E402

from sparsebalance_megatron.attention.kernels import triton as kernels  # noqa: E402

OPTIONS = AttentionOptions(
    SparseBalanceConfig(
        block_size=256, base_budget=32, selection=DEFAULT_SELECTION, coverage_threshold=0.1
    ),
    (8, 16, 32),
)
MOST_LAUNCHES, MOST_LAUNCHES_IF_COVERED = 40, 8
MOST_PARTIAL_BYTES = 528 << 20
"""512 MiB, and what a row knows beside its sums."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Launches of a layer's passes, and bytes that live at once in either."""

    forward: Launches
    backward: Launches
    most_bytes: int
    selection: Selection


def _layer(kernel: Kernel, tokens: int, query_heads: int) -> Layer:
    attention = BudgetedCoreAttention(
        SimpleNamespace(kv_channels=128, num_layers=1, softmax_type="vanilla"),
        *(1, AttnMaskType.padding_causal, "self"),
        options=OPTIONS,
    )
    peak, forward, backward = PeakMemory(), Launches(), Launches()
    with fake_cuda():
        with peak:
            context = LocalMicroBatch(
                layout=packed_layout([0, tokens // 3, tokens], 256, CUDA),
                budgets_LS=torch.empty(1, 2, dtype=torch.int32, device=CUDA),
                max_budgets=(32,),
                observe=True,
            )
            q, k, v, dout = (
                torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=CUDA)
                for heads in (query_heads, 8, 8, query_heads)
            )
        # The grid of budgets is copied once in a layer's life.
        attention._grid_and_base_on(q)
        with torch.no_grad(), peak, forward, forward.of_triton():
            selection = attention.select(q, k, context)
            out, lse = kernel.forward(q, k, v, selection, softmax_scale=SCALE)
        with peak, backward, backward.of_triton():
            kernel.backward(dout, saved(q, k, v, out, lse, selection))
    return Layer(forward, backward, peak.most, selection)


@pytest.mark.parametrize("query_heads", [8, 32])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768, 65536, 131072])
def test_a_layer_launches_few_kernels(tokens: int, query_heads: int) -> None:
    layer = _layer(kernels, tokens, query_heads)
    assert layer.forward.counted.total() <= MOST_LAUNCHES, layer.forward.counted
    assert layer.backward.counted.total() <= MOST_LAUNCHES, layer.backward.counted
    assert layer.selection.indices_QCK.dtype == torch.int16
    for name, arguments in layer.forward.by_triton + layer.backward.by_triton:
        for argument in ("rows", "parts", "scores", "bounds", "left"):
            if isinstance(arguments.get(argument), torch.Tensor):
                assert arguments[argument].nbytes <= MOST_PARTIAL_BYTES, (name, argument)


def test_columns_are_chosen_and_observed_in_few_launches() -> None:
    """The router of ``vertical-slash`` is made of torch's operations, on chunks of blocks."""
    tokens, launches, peak = 65536, Launches(), PeakMemory()
    with fake_cuda(), peak, launches:
        layout = packed_layout([0, tokens], 256, CUDA)
        q, k = (
            torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=CUDA) for heads in (16, 2)
        )
        VERTICAL_SLASH.rank(
            q,
            VERTICAL_SLASH.summaries(q, k, layout),
            LayoutPair.within(layout),
            softmax_scale=SCALE,
            max_budget=32,
            observe=True,
        )
    assert launches.counted.total() <= 3500, launches.counted
    assert peak.most <= 1700 << 20


@pytest.mark.parametrize("tokens", [[8192], [3000, 100, 8192, 5000]], ids=str)
def test_covered_documents_take_one_kernel(tokens: list[int]) -> None:
    """Router and lists are left out; observations and the bounds of documents are made."""
    attention = BudgetedCoreAttention(
        SimpleNamespace(kv_channels=128, num_layers=1, softmax_type="vanilla"),
        *(1, AttnMaskType.padding_causal, "self"),
        options=OPTIONS,
    )
    forward, backward = Launches(), Launches()
    with fake_cuda():
        context = LocalMicroBatch(
            layout=packed_layout([0, *accumulate(tokens)], 256, CUDA),
            budgets_LS=torch.empty(1, len(tokens), dtype=torch.int32, device=CUDA),
            max_budgets=(32,),
            observe=True,
            budgets_on_host_LS=np.full((1, len(tokens)), 32),
        )
        q, k, v, dout = (
            torch.empty(sum(tokens), heads, 128, dtype=torch.bfloat16, device=CUDA)
            for heads in (32, 8, 8, 32)
        )
        with torch.no_grad(), NoTraffic(), forward, forward.of_triton():
            attention._attend(q, k, v, context, None)
            lists = Selection.of_documents(context.layout)
            out, lse = dense.forward(q, k, v, lists, softmax_scale=SCALE)
        with NoTraffic(), backward, backward.of_triton():
            dense.backward(dout, saved(q, k, v, out, lse, lists))
    # The second forward is only there for the backward pass.
    forward.counted["aten::_flash_attention_forward"] -= 1
    assert forward.counted["aten::_flash_attention_forward"] == 1
    assert forward.counted.total() <= MOST_LAUNCHES_IF_COVERED, forward.counted
    assert backward.counted == {"aten::_flash_attention_backward": 1}
