# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA tensors without a GPU: devices, waits of the host, copies, launches.

Tensors are fake: they have a device, a shape and a dtype, and no numbers. Refused are an operation
on tensors of two devices, and one whose result the host must wait for: ``item``, ``nonzero``, a
boolean index, ``repeat_interleave``. Kernels are not run; what they are given is looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention.cases import SCALE, saved
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebalance_megatron.attention import api, layout
from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import (
    rank_sequence,
    selector_named,
    vertical_slash,
)
from sparsebalance_megatron.megatron.core_attention import (
    AttentionOptions,
    BudgetedCoreAttention,
)
from sparsebalance_megatron.megatron.packed_seq_params import MicroBatchContext
from sparsebalance_megatron.selector_registry import BUILT_IN

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from sparsebalance_megatron.attention.kernels import triton as kernels  # noqa: E402

CUDA = torch.device("cuda:0")
HOPPER = (9, 0)
COPIES = {"aten::_to_copy", "aten::copy_"}
ALIGNMENT_BYTES = 16
"""What kernels are compiled for; a pointer that lies otherwise compiles one anew."""


class _NoTraffic(TorchDispatchMode):
    """Refuses copies between the host and the device, but for :func:`.layout.copied_to`."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function._schema.name in COPIES:
            source = arguments[1] if function._schema.name == "aten::copy_" else arguments[0]
            # A number of the host that fills a tensor travels as an argument of the kernel.
            if source.device != result.device and source.ndim:
                raise AssertionError(f"{source.shape} goes from {source.device} to {result.device}")
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every launch of a kernel of Triton: its name, and its arguments by name."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
        found.append((kernel.fn.__name__, named))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    # What a launcher enters so that its kernel runs where its tensors lie.
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def copied_to(host: Tensor, device: torch.device | str) -> Tensor:
            return torch.empty(host.shape, dtype=host.dtype, device=device)

        for module in (api, layout, vertical_slash):
            monkeypatch.setattr(module, "copied_to", copied_to)
        yield mode


def _pass(selection: str, tokens: list[int], head_dim: int = 128) -> list[Tensor]:
    blocks = packed_layout(tokens, 128, CUDA)
    inputs = [
        torch.empty(tokens[-1], heads, head_dim, dtype=torch.bfloat16, device=CUDA)
        for heads in (16, 4, 4)
    ]
    budgets_S = torch.empty(len(tokens) - 1, dtype=torch.int64, device=CUDA)
    selector = selector_named(selection)
    with _NoTraffic():
        ranking = rank_sequence(
            selector, *inputs[:2], blocks, softmax_scale=SCALE, max_budget=8, observe=True
        )
        curves_SK = selector.coverage(ranking)
        selected = selector.select(ranking, budgets_S)
        out_THD, lse_TH = block_sparse_attention(*inputs, selected, softmax_scale=SCALE)
        # Autograd asks the driver for the device's stream, which needs a driver.
        known = saved(*inputs, out_THD, lse_TH, selected)
        gradients = kernels.backward(torch.empty_like(out_THD), known)
    return [curves_SK, out_THD, lse_TH, *gradients]


@pytest.mark.parametrize("tokens", [[0, 2000, 4096], [0, 100, 20000]], ids=["short", "long"])
@pytest.mark.parametrize("selection", sorted(BUILT_IN))
def test_nothing_waits_and_nothing_lies_elsewhere(
    selection: str, tokens: list[int], fake: FakeTensorMode, launches: list[Any]
) -> None:
    results = _pass(selection, tokens)
    assert {x.device for x in results} == {CUDA}
    assert launches
    for name, arguments in launches:
        for argument, value in arguments.items():
            if isinstance(value, Tensor):
                assert value.device == CUDA, f"{name}: {argument} lies on {value.device}"
                offset = value.storage_offset() * value.element_size()
                assert offset % ALIGNMENT_BYTES == 0, f"{name}: {argument}"


@pytest.mark.parametrize("selection", ["token-query-head", "vertical-slash"])
def test_guarded_budgets_in_megatrons_core_attention(
    selection: str, fake: FakeTensorMode, launches: list[Any]
) -> None:
    """The grid of budgets is copied once in a layer's life; after that nothing is."""
    options = AttentionOptions(
        block_size=128,
        base_budget=8,
        selector=selector_named(selection),
        coverage_threshold=0.1,
        implementation="auto",
        grid=(1, 2, 4),
    )
    config = SimpleNamespace(kv_channels=128)
    attention = BudgetedCoreAttention(
        config, 1, AttnMaskType.padding_causal, "self", options=options
    )
    blocks = packed_layout([0, 2000, 4096], 128, CUDA)
    context = MicroBatchContext(
        layout=blocks,
        budgets_LS=torch.empty(1, 2, dtype=torch.int32, device=CUDA),
        max_budgets=(8,),
        observe=True,
    )
    inputs = [
        torch.empty(4096, heads, 128, dtype=torch.bfloat16, device=CUDA) for heads in (16, 4, 4)
    ]
    with torch.no_grad():
        attention.select(*inputs[:2], context)
        with _NoTraffic():
            selected = attention.select(*inputs[:2], context)
    assert {x.device for x in selected.tensors()} == {CUDA}
    assert context.observations
