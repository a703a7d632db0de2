# SPDX-License-Identifier: Apache-2.0
"""How many kernels a layer of the default selection launches, and what it keeps in memory.

Counted on fake CUDA tensors: router, coverage, guard, cut and attention of one core attention. An
operation of torch that is no view and no allocation counts once, though some launch several.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention.cases import SCALE, saved
from megatron.core.transformer.enums import AttnMaskType

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.config import DEFAULT_SELECTION, SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from fake_cuda import CUDA, Launches, fake_cuda  # noqa: E402

from sparsebalance_megatron.attention.kernels import triton as kernels  # noqa: E402

MOST_LAUNCHES = 40
MOST_PARTIAL_BYTES = 528 << 20
"""512 MiB, and what a row knows beside its sums."""


@pytest.mark.parametrize("query_heads", [8, 32])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768, 65536, 131072])
def test_a_layer_launches_few_kernels(tokens: int, query_heads: int) -> None:
    options = AttentionOptions(
        SparseBalanceConfig(
            block_size=256,
            base_budget=32,
            selection=DEFAULT_SELECTION,
            coverage_threshold=0.1,
        ),
        (8, 16, 32),
    )
    attention = BudgetedCoreAttention(
        SimpleNamespace(kv_channels=128, num_layers=1, softmax_type="vanilla"),
        *(1, AttnMaskType.padding_causal, "self"),
        options=options,
    )
    with fake_cuda():
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
        forward, backward = Launches(), Launches()
        with torch.no_grad(), forward, forward.of_triton():
            selection = attention.select(q, k, context)
            out, lse = kernels.forward(q, k, v, selection, softmax_scale=SCALE)
        with backward, backward.of_triton():
            kernels.backward(dout, saved(q, k, v, out, lse, selection))
    assert forward.counted.total() <= MOST_LAUNCHES, forward.counted
    assert backward.counted.total() <= MOST_LAUNCHES, backward.counted
    assert selection.indices_QCK.dtype == torch.int16
    for name, arguments in forward.by_triton + backward.by_triton:
        for argument in ("rows", "parts", "scores", "bounds", "left"):
            if isinstance(arguments.get(argument), torch.Tensor):
                assert arguments[argument].nbytes <= MOST_PARTIAL_BYTES, (name, argument)
