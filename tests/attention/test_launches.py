# SPDX-License-Identifier: Apache-2.0
"""How many kernels a layer of the default selection launches, counted on the CPU.

Torch's operations run; Triton's kernels are counted and not run, so that what they write stays
undefined, which no count depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention.cases import SCALE, saved
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, router_choice, selector_named
from sparsebalance_megatron.config import DEFAULT_SELECTION

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

from sparsebalance_megatron.attention.kernels import triton as kernels  # noqa: E402

WITHOUT_LAUNCH = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


class _Launches(TorchDispatchMode):
    """Counts operations of torch that are no views and no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        aliases = [value.alias_info for value in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and function._schema.name not in WITHOUT_LAUNCH:
            self.number += 1
        return function(*arguments, **(keywords or {}))


def _counted[Result](step: Callable[[], Result]) -> tuple[int, Result]:
    with _Launches() as launches, pytest.MonkeyPatch.context() as patch:

        def run(*_: Any, **__: Any) -> None:
            launches.number += 1

        patch.setattr(triton.runtime.JITFunction, "run", run)
        result = step()
    return launches.number, result


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "most"), [(8, 2, 110), (32, 8, 200), (64, 8, 300)]
)
def test_a_layer_launches_few_kernels(
    query_heads: int, kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More heads have more launches only because the memory of a launch is bounded."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(router_choice, "_obstacle_of_device", lambda device: None)
    tokens, head_dim, budget = 8192, 128, 32
    layout = packed_layout([0, tokens], 256, "cpu")
    q, k, v, dout = (
        torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    selector = selector_named(DEFAULT_SELECTION, "triton")

    def forward() -> Any:
        ranking = rank_sequence(
            selector, q, k, layout, softmax_scale=SCALE, max_budget=budget, observe=True
        )
        selector.coverage(ranking)
        selection = selector.select(ranking, torch.tensor([budget]))
        return selection, kernels.forward(q, k, v, selection, softmax_scale=SCALE)

    forward_launches, (selection, (out, lse)) = _counted(forward)
    known = saved(q, k, v, out, lse, selection)
    backward_launches, _ = _counted(lambda: kernels.backward(dout, known))
    assert forward_launches <= most
    assert backward_launches <= most
