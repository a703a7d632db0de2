# SPDX-License-Identifier: Apache-2.0
"""The public calls: sinks, arguments, one call for all steps, and which implementation runs."""

import dataclasses
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention.cases import (
    SCALE,
    SERVING,
    Case,
    assert_exact,
    assert_identical,
    make_case,
)
from oracles import attention as oracle
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    _resolve,
    block_sparse_attention,
    budgeted_attention,
)
from sparsebalance_megatron.attention.kernels import triton as triton_module
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import ColumnLists
from sparsebalance_megatron.selector_registry import BUILT_IN

BLOCK = 8
serving = pytest.mark.parametrize(("kind", "implementation"), SERVING)


def _case(
    cu_seqlens: list[int], budgets: list[int], kind: str = "previous-block", **settings: Any
) -> Case:
    how = {"block": BLOCK, "head_dim": 8, "value_dim": 5} | settings
    return make_case(cu_seqlens, budgets, kind=kind, **how)


@serving
def test_a_sink_is_a_key_whose_value_is_zero(kind: str, implementation: str) -> None:
    case = _case([0, 21, 48], [2, 3], kind)
    sink_H = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sinks = [sink_H.clone().requires_grad_() for _ in range(2)]

    def ours(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        how = {"softmax_scale": SCALE, "implementation": implementation}
        return block_sparse_attention(*qkv, case.selection, sink_H=sinks[0], **how)

    def plain(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = oracle.plain_attention(*qkv, case.listed_HTT, SCALE)
        return out * torch.sigmoid(lse - sinks[1])[..., None], torch.logaddexp(lse, sinks[1])

    assert_exact(*(case.run(function, torch.float64) for function in (ours, plain)))
    torch.testing.assert_close(sinks[0].grad, sinks[1].grad, rtol=1e-12, atol=1e-12)


def test_wrong_arguments_are_named() -> None:
    case = _case([0, 20], [2])
    q, k, v, lists = case.q_THD, case.k_TGD, case.v_TGF, case.selection
    by_token = _case([0, 20], [2], kind="token-kv-head").selection
    columns = _case([0, 60], [4], kind="vertical-slash").selection.columns
    assert columns is not None
    columns = ColumnLists(tokens_NGK=columns.tokens_NGK[:3, :1], counts_NG=columns.counts_NG[:3])
    other = packed_layout([0, 20], 2 * BLOCK, "cpu")
    for changed, message in (
        ({"selection": by_token, "implementation": "blocks"}, '"blocks" serves'),
        ({"implementation": "tokens"}, '"tokens" serves'),
        ({"selection": dataclasses.replace(lists, columns=columns)}, r"columns \(3, 1, 8\)"),
        ({"implementation": "triton"}, '"triton" needs CUDA, and q lies on cpu: use'),
        ({"implementation": "triton", "selection": by_token}, 'use "tokens" or "auto"'),
        ({"implementation": "fast"}, "implementation 'fast'"),
        ({"v": v[:, :1]}, "k and v must agree"),
        ({"q": q[:9]}, "20 tokens of the selection's query layout"),
        ({"q": q[:, :3]}, "no multiple"),
        ({"k": k[:, :0], "v": v[:, :0]}, "no multiple of 0 KV heads"),
        ({"q": q.double()}, "must share one of float16"),
        ({"q": q.int(), "k": k.int(), "v": v.int()}, "must share one of float16"),
        ({"k": k[:, :1], "v": v[:, :1]}, r"\[3 rows, 1 heads, length\]"),
        ({"q": q[0]}, r"\[tokens, heads, head dim\]"),
        ({"q": q.to("meta")}, "must share one"),
        ({"selection": dataclasses.replace(lists, kv_layout=other)}, "8 tokens .* of 16 for keys"),
        ({"selection": dataclasses.replace(lists, own_block_N=lists.own_block_N[:2])}, "own block"),
        ({"sink_H": torch.zeros(3)}, r"sink has shape \(3,\).*each of the 4 query heads"),
    ):
        how = {"q": q, "k": k, "v": v, "selection": lists, "implementation": "auto"} | changed
        inputs = [how.pop(name) for name in ("q", "k", "v", "selection")]
        with pytest.raises(ValueError, match=message):
            block_sparse_attention(*inputs, softmax_scale=1.0, **how)


@pytest.mark.parametrize("kind", list(BUILT_IN))
@pytest.mark.parametrize(
    ("boundaries", "budgets"),
    [
        ([0, 21, 48], [2, 3]),
        (torch.tensor([0, 21, 48], dtype=torch.int32), torch.tensor([2, 3])),
        ([0, 21, 48], np.array([2, 3])),
    ],
)
def test_one_call_is_its_steps(kind: str, boundaries: Any, budgets: Any) -> None:
    case = _case([0, 21, 48], [2, 3], kind=kind)
    one_call = case.run(
        lambda q, k, v: budgeted_attention(
            *(q, k, v, boundaries, budgets),
            block_size=BLOCK,
            softmax_scale=SCALE,
            selection=kind,
        ),
        torch.float32,
    )
    assert_identical(one_call, case.ours("auto", torch.float32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budgets": [2]}, r"budgets \[2\]: must be .* one for each of the 2 documents"),
        ({"budgets": 0}, "all at least 1"),
        ({"budgets": 2.5}, "budgets 2.5: must be whole numbers"),
        ({"budgets": [2.7, 1]}, "must be whole numbers"),
        ({"cu_seqlens": [0, 9]}, "9 tokens as in its layout"),
        ({"cu_seqlens": [0, 9, 9, 20]}, "document 1 has 0 tokens"),
        ({"cu_seqlens": torch.empty(3, device="meta")}, "lies on meta, .* a tensor on the CPU"),
        ({"selection": "token"}, "token: must be one of token-query-head, "),
        ({"implementation": "fast"}, "implementation 'fast': must be one of"),
    ],
)
def test_wrong_arguments_of_the_one_call_are_named(changed: dict[str, Any], message: str) -> None:
    q, k = torch.ones(20, 2, 4), torch.ones(20, 1, 4)
    arguments = {"cu_seqlens": [0, 12, 20], "budgets": 2, "block_size": 8, "softmax_scale": 1.0}
    with pytest.raises(ValueError, match=message):
        budgeted_attention(q, k, k, **arguments | changed)


@pytest.mark.parametrize(
    ("kind", "other"), [("previous-block", "blocks"), ("token-kv-head", "tokens")]
)
def test_auto_says_when_it_cannot_take_the_fast_kernels_on_a_gpu(
    kind: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for a query on a GPU, which this choice only looks at."""
    monkeypatch.setattr(triton_module, "capability_of", lambda _: (9, 0))
    case = make_case([0, 40], [2], block=16, head_dim=64, kind=kind)
    selection = case.selection
    half, double = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(40, 2, 64))
        for dtype in (torch.bfloat16, torch.float64)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _resolve("auto", half, half, selection) == "triton"
        monkeypatch.setattr(triton_module, "capability_of", lambda _: (8, 9))
        assert _resolve("auto", half, half, selection) == "triton"
    said = f'"{other}" on CUDA, slowly: "triton" does not compute in float64: use "{other}"'
    with pytest.warns(UserWarning, match=said):
        assert _resolve("auto", double, double, selection) == other
    monkeypatch.setattr(triton_module, "capability_of", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.warns(UserWarning, match=f'Tesla T4, has 7.5: use "{other}"'):
        assert _resolve("auto", half, half, selection) == other
    with pytest.raises(ValueError, match=f'"triton" has tile shapes .* has 7.5: use "{other}"'):
        _resolve("triton", half, half, selection)


def test_the_example_of_the_document_runs() -> None:
    document = Path(__file__).parents[2] / "research" / "kernels.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (1024, 8, 64)
    assert names["lse"].shape == (1024, 8)
    assert all(names[name].grad.abs().sum() > 0 for name in ("query", "key", "value"))
