# SPDX-License-Identifier: Apache-2.0
"""What Triton kernels promise for every kind of list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import (
    SCALE,
    Case,
    assert_identical,
    assert_right,
    make_case,
    on_device,
    reselected,
    saved,
    with_heads_far_apart,
)
from attention.triton.where import DEVICE, INTERPRETED, pytestmark  # noqa: F401
from torch import Tensor

from sparsebalance_megatron.attention.kernels import triton as implementation
from sparsebalance_megatron.attention.selection import Selection

KINDS = ("previous-block", "token-kv-head", "vertical-slash")
every_kind = pytest.mark.parametrize("kind", KINDS)


def _case(kind: str, cu_seqlens: list[int], budgets: list[int], **settings) -> Case:
    defaults = {"block": 16, "head_dim": 16, "value_dim": 8, "heads": 2, "kv_heads": 1}
    return make_case(cu_seqlens, budgets, granularity=kind, device=DEVICE, **defaults | settings)


def _attend(inputs: tuple[Tensor, ...], selection: Selection) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv from q, k, v and dout, by the kernels themselves."""
    *qkv, dout = inputs
    results = implementation.forward(*qkv, selection, softmax_scale=SCALE)
    gradients = implementation.backward(dout, saved(*qkv, *results, selection))
    return tuple(x.cpu() for x in (*results, *gradients))


QUERY_BLOCK = {"head_dim": 64, "heads": 4, "kv_heads": 2}
RESULTS = [
    *(
        ("previous-block", cu_seqlens, budgets, {"block": block, "dtype": dtype, **QUERY_BLOCK})
        for cu_seqlens, budgets, block in (
            ([0, 98], [1], 32),
            ([0, 201], [2], 32),
            ([0, 1, 2, 30, 101], [1, 3, 2, 3], 16),
            ([0, 69, 140], [99, 99], 32),
            ([0, 3, 5, 6], [1, 2, 1], 64),
            ([0, 200], [3], 64),
        )
        for dtype in (torch.float32, torch.float16)
    ),
    ("token-kv-head", [0, 1, 2, 30, 71], [1, 3, 2, 3], {"heads": 3}),
    ("token-query-head", [0, 75], [2], {"block": 32, "head_dim": 64, "dtype": torch.float16}),
    ("token-kv-head", [0, 20, 97], [9, 9], {"block": 64, "head_dim": 128, "kv_heads": 2}),
    ("token-query-head", [0, 3, 5], [1, 2], {"block": 64, "head_dim": 80}),
    ("vertical-slash", [0, 1, 18, 70, 121], [1, 2, 3, 3], {}),
    ("vertical-slash", [0, 130], [7], {"heads": 1}),
    (
        *("vertical-slash", [0, 130], [3]),
        {"block": 32, "head_dim": 64, "kv_heads": 2, "dtype": torch.float16},
    ),
    ("vertical-slash", [0, 20, 90], [1, 3], {"heads": 3, "head_dim": 24}),
    ("vertical-slash-last-queries", [0, 70], [3], {}),
    ("vertical-slash", [0, 40, 60], [9, 9], {}),
    *(
        (kind, [0, 1, 18, 70, 121], [1, 2, 3, 3], {"dtype": torch.bfloat16, **QUERY_BLOCK})
        for kind in ("previous-block", "token-kv-head", "token-query-head", "vertical-slash")
    ),
]


@pytest.mark.parametrize(("kind", "cu_seqlens", "budgets", "how"), RESULTS)
def test_every_result_is_as_good_as_plain_torch(
    kind: str, cu_seqlens: list[int], budgets: list[int], how: dict[str, Any]
) -> None:
    """One-token documents, odd lengths, budgets that hold everything, documents shorter than a
    block; columns of several blocks, odd groups. Lists are those of the definition."""
    case = _case(kind, cu_seqlens, budgets, **how)
    if case.selection.columns is not None:
        assert torch.equal(case.mask_HTT, case.listed_HTT)
    assert_right(case, case.q_THD.dtype)


@every_kind
def test_results_repeat_and_later_tokens_change_no_bit(kind: str) -> None:
    """Token 69 lies inside a block; the loss is over what comes before it, so dq, dk and dv too."""
    token, results = 69, []
    for factor in (1.0, 1.0, -30.0):
        case = _case(kind, [0, 80], [3])
        for x in (case.q_THD, case.k_TGD, case.v_TGF):
            x[token:] *= factor
        case.dout_THF[token:] = 0.0
        ours = reselected(case).ours("triton", torch.float32)
        results.append(tuple(x[:token] for x in ours))
    assert_identical(results[0], results[1])
    assert_identical(results[0], results[2])


@every_kind
def test_strided_inputs_are_read_in_place(kind: str) -> None:
    """Megatron's q, k and v are views of one projection; lists may be views as well."""
    case = _case(kind, [0, 70], [3], heads=4, kv_heads=2, value_dim=16)
    q, k, v = (x.unflatten(1, (2, -1)).to(DEVICE) for x in (case.q_THD, case.k_TGD, case.v_TGF))
    mixed = torch.cat([q, k, v], dim=2)
    q, k, v = mixed[:, :, :2].flatten(1, 2), mixed[:, :, 2], mixed[:, :, 3]
    assert not k.is_contiguous()
    dout = case.dout_THF.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    selection = on_device(case.selection, DEVICE)
    lists = [
        x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x
        for x in selection.tensors()
    ]
    layout = selection.query_layout
    selection = Selection.of_tensors(
        lists, by_token=selection.by_token, query_layout=layout, kv_layout=layout
    )
    assert_identical(_attend((q, k, v, dout), selection), case.ours("triton", torch.float32))


@pytest.mark.skipif(not INTERPRETED, reason="memory of the host")
@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("previous-block", 1), ("token-kv-head", 1), ("vertical-slash", 3)]
)
def test_heads_more_than_2_to_the_31_elements_apart(
    kind: str, kv_heads: int, tmp_path: Path
) -> None:
    """Those of the queries; those of the keys where there are as many."""
    case = _case(kind, [0, 52], [3], heads=3, kv_heads=kv_heads, dtype=torch.float16)
    near = [case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF]
    moved = 1 if kv_heads == 3 else 0
    far = [*near[:moved], with_heads_far_apart(near[moved], tmp_path / "x"), *near[moved + 1 :]]
    assert_identical(_attend(tuple(far), case.selection), _attend(tuple(near), case.selection))
