# SPDX-License-Identifier: Apache-2.0
"""Every implementation on parts of lists, and on queries and keys that lie in rows of their own."""

from __future__ import annotations

import random

import pytest
import torch
from attention.cases import (
    SCALE,
    Case,
    assert_exact,
    compute_as_off_the_cpu,
    in_shards,
    make_case,
    sharded,
    tokens_of,
)

from sparsebalance_megatron.attention.api import block_sparse_attention

SERVING = [
    pytest.param("blocks", "previous-block", id="blocks"),
    pytest.param("tokens", "token-kv-head", id="tokens-kv-head"),
    pytest.param("tokens", "token-query-head", id="tokens-query-head"),
    pytest.param("reference", "previous-block", id="reference-query-block"),
    pytest.param("reference", "token-query-head", id="reference-token"),
]
CU_SEQLENS, BUDGETS, BLOCKS = [0, 1, 2, 30, 51, 111], [1, 3, 2, 3, 5], 17
ALL = [range(BLOCKS)]


def _case(granularity: str) -> Case:
    case = make_case(CU_SEQLENS, BUDGETS, block=8, head_dim=8, granularity=granularity)
    assert case.selection.query_layout.blocks == BLOCKS
    return case


def _random_halves(seed: int) -> list[list[int]]:
    chosen = set(random.Random(seed).sample(range(BLOCKS), BLOCKS // 2))
    return [[n for n in range(BLOCKS) if (n in chosen) == half] for half in (True, False)]


@pytest.mark.parametrize(("implementation", "granularity"), SERVING)
@pytest.mark.parametrize(
    ("query_shards", "kv_shards"),
    [
        pytest.param(ALL, ALL, id="lists-cut"),
        pytest.param(_random_halves(0), ALL, id="queries-cut"),
        pytest.param(ALL, _random_halves(1), id="keys-cut"),
        pytest.param(_random_halves(2), _random_halves(3), id="both-cut"),
        pytest.param([[0, 1], range(2, BLOCKS)], ALL, id="short-blocks-of-queries"),
        pytest.param(ALL, [[0, 1], range(2, BLOCKS)], id="short-blocks-of-keys"),
    ],
)
def test_parts_add_up_to_the_whole(
    implementation: str, granularity: str, query_shards: list[list[int]], kv_shards: list[list[int]]
) -> None:
    """Every list is also cut into its even and its odd places."""
    case = _case(granularity)
    parts = in_shards(case, implementation, torch.float64, query_shards, kv_shards)
    assert_exact(parts, case.exact())


@pytest.mark.parametrize(("implementation", "granularity"), SERVING)
@pytest.mark.parametrize("on_full_width", [False, True])
def test_queries_of_some_blocks_get_their_rows_of_the_whole(
    implementation: str, granularity: str, on_full_width: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, through the public call; as computed on the CPU and elsewhere."""
    if on_full_width:
        compute_as_off_the_cpu(monkeypatch)
    case = _case(granularity)
    some = _random_halves(4)[0]
    rows = tokens_of(case.selection.query_layout, some)
    case.dout_THF[torch.isin(torch.arange(CU_SEQLENS[-1]), rows, invert=True)] = 0.0
    selection = sharded(case.selection, some, range(BLOCKS))
    q, k, v = (x.double().requires_grad_() for x in (case.q_THD[rows], case.k_TGD, case.v_TGF))
    out, lse = block_sparse_attention(
        q, k, v, selection, softmax_scale=SCALE, implementation=implementation
    )
    out.backward(case.dout_THF[rows].double())
    whole = case.exact()
    expected = [*(x[rows] for x in whole[:3]), *whole[3:]]
    assert_exact((out, lse, q.grad, k.grad, v.grad), expected)


@pytest.mark.parametrize(("implementation", "granularity"), SERVING)
def test_a_document_of_nan_stays_alone(implementation: str, granularity: str) -> None:
    """Also where queries and keys lie in different rows."""
    case = _case(granularity)
    clean = in_shards(case, implementation, torch.float64, _random_halves(0), ALL)
    for x in (case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF):
        x[CU_SEQLENS[2] : CU_SEQLENS[3]] = torch.nan
    dirty = in_shards(case, implementation, torch.float64, _random_halves(0), ALL)
    for a, b in zip(dirty, clean, strict=True):
        assert a[: CU_SEQLENS[2]].equal(b[: CU_SEQLENS[2]])
        assert a[CU_SEQLENS[3] :].equal(b[CU_SEQLENS[3] :])
        assert a[CU_SEQLENS[2] : CU_SEQLENS[3]].isnan().any()
