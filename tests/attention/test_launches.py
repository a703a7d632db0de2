# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA tensors without a GPU: launches of a layer, waits of the host, copies, devices.

Counted on fake CUDA tensors: router, coverage, cut and attention of one core attention. An
operation of torch that is no view and no allocation counts once, though some launch several.
"""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from attention.cases import SCALE, inputs_of, saved
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sparsebalance_megatron.attention.kernels import dense, fa4
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select.vertical_slash import VERTICAL_SLASH
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import DEFAULT_SELECTION, DenseAttention, SparseBalanceConfig
from sparsebalance_megatron.megatron.core_attention import AttentionOptions, BudgetedCoreAttention
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.selector_registry import BUILT_IN

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from fake_cuda import CUDA, Launches, NoTraffic, PeakMemory, fake_cuda  # noqa: E402

from sparsebalance_megatron.attention.kernels import triton as kernels  # noqa: E402

MOST_LAUNCHES, MOST_LAUNCHES_IF_COVERED = 40, 8
MOST_PARTIAL_BYTES = 528 << 20
"""512 MiB, and what a row knows beside its sums."""


def _drawn(tokens: int, *heads: int) -> list[Tensor]:
    """Tensors of fake CUDA, for each number of heads."""
    how = {"dtype": torch.bfloat16, "device": CUDA}
    return [torch.empty(tokens, each, 128, **how) for each in heads]


def _attention(selection: str, kernel: DenseAttention = "torch") -> BudgetedCoreAttention:
    chosen = SparseBalanceConfig(
        block_size=256, base_budget=32, selection=selection, dense_attention=kernel
    )
    return BudgetedCoreAttention(
        SimpleNamespace(kv_channels=128, num_layers=1, softmax_type="vanilla"),
        *(1, AttnMaskType.padding_causal, "self"),
        options=AttentionOptions(chosen, (8, 16, 32)),
    )


def _context(
    boundaries: list[int], *, dense_documents: int = 0, observe: bool = True
) -> LocalMicroBatch:
    """A micro-batch of fake CUDA for one layer."""
    return LocalMicroBatch(
        layout=packed_layout(boundaries, 256, CUDA),
        budgets_LS=torch.empty(1, len(boundaries) - 1, dtype=torch.int32, device=CUDA),
        max_budgets=(32,),
        observe=observe,
        dense_documents_L=(dense_documents,),
    )


def _layer(
    tokens: int, query_heads: int, selection: str = DEFAULT_SELECTION
) -> tuple[Launches, Launches, list[Tensor]]:
    """Launches of a layer's passes, and its results; nothing is copied meanwhile."""
    attention, forward, backward = _attention(selection), Launches(), Launches()
    with fake_cuda():
        context = _context([0, tokens // 3, tokens])
        q, k, v, dout = _drawn(tokens, query_heads, 8, 8, query_heads)
        # The grid of budgets is copied once in a layer's life.
        attention._grid_and_base_on(q)
        with torch.no_grad(), NoTraffic(), forward, forward.of_triton():
            lists = attention.select(q, k, context)
            out, lse = kernels.forward(inputs_of(q, k, v, lists))
        with NoTraffic(), backward, backward.of_triton():
            gradients = kernels.backward(dout, saved(q, k, v, out, lse, lists))
    assert context.observations
    return forward, backward, [*lists.tensors(), out, lse, *gradients]


@pytest.mark.parametrize("tokens", [2048, 20000])
@pytest.mark.parametrize("selection", sorted(BUILT_IN))
def test_nothing_waits_and_nothing_lies_elsewhere(selection: str, tokens: int) -> None:
    forward, backward, results = _layer(tokens, 16, selection)
    assert {x.device for x in results} == {CUDA}
    assert forward.by_triton and backward.by_triton


@pytest.mark.parametrize("query_heads", [8, 32])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768, 65536, 131072])
def test_a_layer_launches_few_kernels(tokens: int, query_heads: int) -> None:
    forward, backward, (indices_QCK, *_) = _layer(tokens, query_heads)
    assert forward.counted.total() <= MOST_LAUNCHES, forward.counted
    assert backward.counted.total() <= MOST_LAUNCHES, backward.counted
    assert indices_QCK.dtype == torch.int16
    for launch in forward.by_triton + backward.by_triton:
        for argument in ("rows", "parts", "scores", "bounds", "left"):
            if isinstance(found := launch.named.get(argument), torch.Tensor):
                assert found.nbytes <= MOST_PARTIAL_BYTES, (launch.name, argument)


def test_columns_are_chosen_and_observed_in_few_launches() -> None:
    """The router of ``vertical-slash`` is made of torch's operations, on chunks of blocks."""
    tokens, launches, peak = 65536, Launches(), PeakMemory()
    with fake_cuda(), peak, launches:
        layout = packed_layout([0, tokens], 256, CUDA)
        q, k = _drawn(tokens, 16, 2)
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
    attention, forward, backward = _attention(DEFAULT_SELECTION), Launches(), Launches()
    with fake_cuda():
        context = _context([0, *accumulate(tokens)], dense_documents=len(tokens))
        q, k, v, dout = _drawn(sum(tokens), 32, 8, 8, 32)
        with torch.no_grad(), NoTraffic(), forward, forward.of_triton():
            attention._attend(q, k, v, context)
            lists = Selection.of_documents(context.layout)
            out, lse = dense.forward(inputs_of(q, k, v, lists))
        with NoTraffic(), backward, backward.of_triton():
            dense.backward(dout, saved(q, k, v, out, lse, lists))
    # The second forward is only there for the backward pass.
    forward.counted["aten::_flash_attention_forward"] -= 1
    assert forward.counted["aten::_flash_attention_forward"] == 1
    assert forward.counted.total() <= MOST_LAUNCHES_IF_COVERED, forward.counted
    assert backward.counted == {"aten::_flash_attention_backward": 1}


@pytest.mark.parametrize("kernel", ["auto", "fa4"])
def test_covered_documents_take_flash_attention_4_where_it_serves(
    kernel: DenseAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy, a wait of the host, and anything beside its one call."""
    given: list[dict[str, object]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, **named: object) -> tuple[Tensor, ...]:
        given.append(named)
        return torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32), None

    monkeypatch.setattr(fa4, "interface", lambda: SimpleNamespace(_flash_attn_fwd=forward))
    monkeypatch.setattr(fa4, "obstacle", lambda *_: None)
    attention, launches = _attention(DEFAULT_SELECTION, kernel), Launches()
    with fake_cuda():
        context = _context([0, 3000, 8192], dense_documents=2, observe=False)
        q, k, v = _drawn(8192, 32, 8, 8)
        with torch.no_grad(), NoTraffic(), launches:
            attention._attend(q, k, v, context)
    (named,) = given
    assert named["max_seqlen_q"] == 5192 and named["causal"] is True
    # The bounds of documents, once a micro-batch.
    assert launches.counted.total() <= 3, launches.counted
