# SPDX-License-Identifier: Apache-2.0
"""Every implementation against attention in Python loops, in float64 and in training precision."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention.cases import (
    SCALE,
    Case,
    assert_as_good_as_plain,
    compute_as_off_the_cpu,
    make_case,
    with_lists,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sparsebalance_megatron.attention.api import (
    _resolve,
    block_sparse_attention,
    budgeted_attention,
)
from sparsebalance_megatron.attention.kernels import tile_attention
from sparsebalance_megatron.attention.kernels import tokens as tokens_module
from sparsebalance_megatron.attention.kernels import triton as triton_module
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.selector_registry import BUILT_IN

BLOCK, HEAD_DIM = 8, 8
CASES = [
    pytest.param([0, 40], [1], id="own-block-only"),
    pytest.param([0, 37], [2], id="odd-length"),
    pytest.param([0, 1, 2, 30, 51], [1, 3, 2, 3], id="one-token-documents-mixed-budgets"),
    pytest.param([0, 21, 48], [9, 9], id="everything"),
    pytest.param([0, 3, 5, 6], [1, 2, 1], id="shorter-than-a-block"),
]


def _case(cu_seqlens: list[int], budgets: list[int], **settings: Any) -> Case:
    return make_case(cu_seqlens, budgets, block=BLOCK, head_dim=HEAD_DIM, **settings)


def _serving(granularity: str) -> tuple[str, ...]:
    return ("blocks" if granularity == "previous-block" else "tokens", "reference")


@pytest.mark.parametrize(("cu_seqlens", "budgets"), CASES)
@pytest.mark.parametrize("implementation", ["blocks", "reference"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float64_equals_the_loops(
    cu_seqlens: list[int], budgets: list[int], implementation: str, kv_heads: int
) -> None:
    case = _case(cu_seqlens, budgets, kv_heads=kv_heads)
    for ours, exact in zip(case.ours(implementation, torch.float64), case.exact(), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("granularity", ["token-kv-head", "token-query-head"])
@pytest.mark.parametrize("implementation", ["auto", "tokens", "reference"])
@pytest.mark.parametrize(("cu_seqlens", "budgets"), CASES)
def test_selections_by_token_equal_the_loops(
    granularity: str, implementation: str, cu_seqlens: list[int], budgets: list[int]
) -> None:
    case = _case(cu_seqlens, budgets, granularity=granularity)
    for ours, exact in zip(case.ours(implementation, torch.float64), case.exact(), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("budget", [1, 2, 3, 16])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_moba_at_its_budgets(budget: int, kv_heads: int) -> None:
    """The own block counts; at 1 a query reads nothing but its own block."""
    case = _case([0, 90, 103], [budget, budget], granularity="token-query-head", kv_heads=kv_heads)
    read_H = case.mask_HTT[:, 89].sum(-1)
    assert read_H.tolist() == [8 * (min(budget, 12) - 1) + 2] * 4
    for ours, exact in zip(case.ours("auto", torch.float64), case.exact(), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("cu_seqlens", "budgets"), CASES)
@pytest.mark.parametrize("implementation", ["blocks", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_precision_is_as_good_as_plain_torch(
    cu_seqlens: list[int], budgets: list[int], implementation: str, dtype: torch.dtype
) -> None:
    case = _case(cu_seqlens, budgets, dtype=dtype)
    ours = case.ours(implementation, dtype)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_as_good_as_plain(case, ours, dtype, case.exact())


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_full_budgets_are_dense_causal_attention(implementation: str) -> None:
    cu_seqlens = [0, 33, 80]
    case = _case(cu_seqlens, [5, 99])
    out_THD = case.ours(implementation, torch.float64)[0]
    for begin, end in ((0, 33), (33, 80)):
        dense = scaled_dot_product_attention(
            *(x[begin:end].double().transpose(0, 1) for x in (case.q_THD, case.k_TGD, case.v_TGD)),
            is_causal=True,
            enable_gqa=True,
            scale=SCALE,
        )
        torch.testing.assert_close(out_THD[begin:end], dense.transpose(0, 1))


@st.composite
def _random_cases(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 45), min_size=1, max_size=3))
    budgets = draw(st.lists(st.integers(1, 7), min_size=len(lengths), max_size=len(lengths)))
    return [0, *torch.tensor(lengths).cumsum(0).tolist()], budgets


@given(_random_cases())
@settings(max_examples=12, deadline=None)
def test_blocks_equals_reference(case_inputs: tuple[list[int], list[int]]) -> None:
    case = _case(*case_inputs)
    blocks, reference = (case.ours(i, torch.float64) for i in ("blocks", "reference"))
    for a, b in zip(blocks, reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("implementation", "kept"), [("blocks", 1), ("reference", 0)])
def test_order_of_a_list_does_not_matter(implementation: str, kept: int) -> None:
    """``blocks`` needs the own block first; ``reference`` needs nothing."""
    case = _case([0, 61], [5])
    indices_QCK = case.selection.indices_QCK.clone()
    for row in range(indices_QCK.shape[0]):
        count = int(case.selection.counts_QC[row, 0])
        indices_QCK[row, :, kept:count] = indices_QCK[row, :, kept:count].flip(-1)
    assert not torch.equal(indices_QCK, case.selection.indices_QCK)
    flipped = with_lists(case, indices_QCK, case.selection.counts_QC)
    pairs = zip(
        case.ours(implementation, torch.float64),
        flipped.ours(implementation, torch.float64),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_a_query_without_keys_gives_zero_and_finite_gradients(implementation: str) -> None:
    case = _case([0, 40], [3])
    indices_QCK, counts_QC = case.selection.indices_QCK.clone(), case.selection.counts_QC.clone()
    indices_QCK[2], counts_QC[2] = -1, 0
    out, lse, *gradients = with_lists(case, indices_QCK, counts_QC).ours(
        implementation, torch.float32
    )
    assert (out[16:24] == 0).all()
    assert (lse[16:24] == -torch.inf).all()
    assert lse[:16].isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][16:24] == 0).all()


@pytest.mark.parametrize("empty_row", [None, 2])
def test_lists_masked_at_full_width_equal_sorted_lists(
    empty_row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of devices whose list lengths the host does not read."""
    case = _case([0, 1, 2, 30, 51], [1, 3, 2, 3])
    indices_QCK, counts_QC = case.selection.indices_QCK.clone(), case.selection.counts_QC.clone()
    if empty_row is not None:
        indices_QCK[empty_row], counts_QC[empty_row] = -1, 0
    case = with_lists(case, indices_QCK, counts_QC)
    by_length = case.ours("blocks", torch.float64)
    compute_as_off_the_cpu(monkeypatch)
    for a, b in zip(case.ours("blocks", torch.float64), by_length, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("granularity", ["previous-block", "token-kv-head", "token-query-head"])
@pytest.mark.parametrize("scores_at_once", [1, 700, 3000])
def test_results_do_not_depend_on_what_is_computed_at_once(
    granularity: str, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case([0, 30, 77], [3, 4], granularity=granularity)
    whole = case.ours("auto", torch.float64)
    monkeypatch.setattr(tile_attention, "_SCORES_AT_ONCE", scores_at_once)
    for a, b in zip(case.ours("auto", torch.float64), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["token-kv-head", "token-query-head"])
def test_selections_by_token_in_training_precision(granularity: str, dtype: torch.dtype) -> None:
    case = _case([0, 1, 2, 30, 51], [1, 3, 2, 3], granularity=granularity, dtype=dtype)
    ours = case.ours("tokens", dtype)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_as_good_as_plain(case, ours, dtype, case.exact())


@pytest.mark.parametrize("granularity", ["token-kv-head", "token-query-head"])
@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize(("tile_rows", "places_at_once"), [(1, 8), (6, 1), (16, 2), (768, 3)])
def test_tiles_of_tokens_may_be_padded_and_cut(
    granularity: str,
    off_the_cpu: bool,
    tile_rows: int,
    places_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also as many tiles as there may be at most, where the host does not read."""
    case = _case([0, 13, 41], [2, 3], granularity=granularity)
    expected = case.ours("tokens", torch.float64)
    monkeypatch.setattr(tokens_module, "_TILE_ROWS", (tile_rows,))
    monkeypatch.setattr(tokens_module, "_PLACES_AT_ONCE", places_at_once)
    if off_the_cpu:
        compute_as_off_the_cpu(monkeypatch)
    for a, b in zip(case.ours("tokens", torch.float64), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_token_without_keys_gives_zero_and_finite_gradients() -> None:
    case = _case([0, 40], [3], granularity="token-kv-head")
    indices_TGK, counts_TG = case.selection.indices_QCK.clone(), case.selection.counts_QC.clone()
    indices_TGK[20], counts_TG[20] = -1, 0
    changed = with_lists(case, indices_TGK, counts_TG)
    out, lse, *gradients = changed.ours("tokens", torch.float32)
    assert (out[20] == 0).all()
    assert (lse[20] == -torch.inf).all()
    assert lse[:20].isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][20] == 0).all()


def test_32_blocks_of_256_are_dense_up_to_8192_tokens() -> None:
    tokens, head_dim = 8192, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, head_dim, generator=generator) for _ in range(3))
    out_THD, sparse_THD = (
        budgeted_attention(q, k, v, [0, tokens], budget, block_size=256, softmax_scale=SCALE)[0]
        for budget in (32, 31)
    )
    dense_HTD = scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(out_THD, dense_HTD.transpose(0, 1))
    assert (sparse_THD[:-256] - out_THD[:-256]).abs().max() < 1e-5
    assert (sparse_THD[-256:] - out_THD[-256:]).abs().max() > 1e-3


def test_mass_covered_grows_with_the_budget() -> None:
    """More blocks never lose what fewer had: LSE rises to the dense one."""
    lse = [
        _case([0, 100], [budget]).ours("blocks", torch.float64)[1] for budget in (1, 2, 3, 5, 8, 13)
    ]
    for less, more in itertools.pairwise(lse):
        assert (more >= less - 1e-12).all()
        assert (more > less + 1e-3).any()


@pytest.mark.parametrize("granularity", ["previous-block", "token-query-head"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_passes_repeat_every_bit(granularity: str, reentrant: bool) -> None:
    case = _case([0, 30, 51], [3, 2], granularity=granularity)
    for implementation in _serving(granularity):

        def attend(q: Tensor, k: Tensor, v: Tensor, name: str = implementation):
            return block_sparse_attention(
                q, k, v, case.selection, softmax_scale=SCALE, implementation=name
            )

        once = case.run(attend, torch.float32)
        twice = case.run(
            lambda q, k, v, f=attend: checkpoint(f, q, k, v, use_reentrant=reentrant), torch.float32
        )
        for a, b in zip(once, twice, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_gradients_of_two_calls_add_up(implementation: str) -> None:
    case = _case([0, 40], [2])
    single = case.ours(implementation, torch.float64)

    def attend_twice(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        results = [
            block_sparse_attention(
                *leaves, case.selection, softmax_scale=SCALE, implementation=implementation
            )
            for _ in range(2)
        ]
        return results[0][0] + results[1][0], results[0][1]

    double = case.run(attend_twice, torch.float64)
    for a, b in zip(double[2:], single[2:], strict=True):
        torch.testing.assert_close(a, 2 * b)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_without_gradients_the_values_are_the_same(implementation: str) -> None:
    case = _case([0, 40], [2])
    expected = case.ours(implementation, torch.float32)
    with torch.no_grad():
        out_THD, lse_TH = block_sparse_attention(
            case.q_THD,
            case.k_TGD,
            case.v_TGD,
            case.selection,
            softmax_scale=SCALE,
            implementation=implementation,
        )
    assert torch.equal(out_THD, expected[0])
    assert torch.equal(lse_TH, expected[1])
    assert not out_THD.requires_grad


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_lse_carries_no_gradient_and_inputs_stay_as_they_were(implementation: str) -> None:
    case = _case([0, 8], [1], heads=1, kv_heads=1)
    copies = [x.clone() for x in (case.q_THD, case.k_TGD, case.v_TGD)]
    q_THD = case.q_THD.clone().requires_grad_()
    _, lse_TH = block_sparse_attention(
        q_THD,
        case.k_TGD,
        case.v_TGD,
        case.selection,
        softmax_scale=SCALE,
        implementation=implementation,
    )
    assert not lse_TH.requires_grad
    case.ours(implementation, torch.float32)
    for x, copy in zip((case.q_THD, case.k_TGD, case.v_TGD), copies, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
def test_large_scores_stay_finite(implementation: str) -> None:
    case = _case([0, 50], [3])
    case = dataclasses.replace(case, q_THD=case.q_THD * 300)
    ours = case.ours(implementation, torch.float32)
    assert all(x.isfinite().all() for x in ours)
    assert_as_good_as_plain(case, ours, torch.float32, case.exact())


def test_lse_difference_is_the_mass_covered() -> None:
    case, dense = _case([0, 60], [2]), _case([0, 60], [99])
    _, sparse_lse_TH, *_ = case.ours("blocks", torch.float64)
    _, dense_lse_TH, *_ = dense.ours("blocks", torch.float64)
    k_THD = case.k_TGD.double().repeat_interleave(2, 1)
    logits_HTT = torch.einsum("qhd,khd->hqk", case.q_THD.double(), k_THD) * SCALE
    p_HTT = logits_HTT.masked_fill(~dense.mask_HTT, -torch.inf).softmax(-1)
    mass_TH = p_HTT.masked_fill(~case.mask_HTT, 0.0).sum(-1).t()
    assert mass_TH.min() < 0.9
    torch.testing.assert_close((sparse_lse_TH - dense_lse_TH).exp(), mass_TH)


def test_router_coverage_is_the_true_mass_where_keys_of_a_block_agree() -> None:
    """One key and one query per block: the router's scores are attention's, block by block."""
    tokens, head_dim = 48, 8
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(tokens // BLOCK, 1, head_dim, generator=generator).repeat_interleave(BLOCK, 0)
        for _ in range(2)
    )
    layout = packed_layout([0, tokens], BLOCK, "cpu")
    selector = selector_named("token-query-head")
    ranking = rank_sequence(selector, q, k, layout, softmax_scale=SCALE, max_budget=1, observe=True)
    curves_SK = selector.coverage(ranking)
    lse = [
        budgeted_attention(q, k, k, [0, tokens], budget, block_size=BLOCK, softmax_scale=SCALE)[1]
        for budget in (2, 99)
    ]
    # Only a block's last token sees all of its block, as the router does.
    mass = (lse[0] - lse[1]).exp()[BLOCK - 1 :: BLOCK].mean()
    torch.testing.assert_close(curves_SK[0, 1], mass)


def test_a_gpu_without_tile_shapes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_module, "_interpreted", lambda: True)
    monkeypatch.setattr(triton_module, "capability_of", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    case = _case([0, 20], [2])
    expected = r'capability 8.0, 9.0, .*; this one, NVIDIA L40S, has 8.9: use "blocks"'
    with pytest.raises(ValueError, match=expected):
        block_sparse_attention(
            case.q_THD,
            case.k_TGD,
            case.v_TGD,
            case.selection,
            softmax_scale=1.0,
            implementation="triton",
        )


def test_wrong_arguments_are_named() -> None:
    case = _case([0, 20], [2])

    def attend(q=case.q_THD, k=case.k_TGD, v=case.v_TGD, selection=case.selection, name="auto"):
        block_sparse_attention(q, k, v, selection, softmax_scale=1.0, implementation=name)

    by_token = _case([0, 20], [2], granularity="token-kv-head").selection
    with pytest.raises(ValueError, match='"blocks" serves selections by query block'):
        attend(selection=by_token, name="blocks")
    with pytest.raises(ValueError, match='"tokens" serves selections by token'):
        attend(name="tokens")
    with pytest.raises(ValueError, match='"triton" needs CUDA, and q lies on cpu: use'):
        attend(name="triton")
    with pytest.raises(ValueError, match=r'"triton" needs CUDA, .* use "tokens" or "auto"'):
        attend(name="triton", selection=by_token)
    with pytest.raises(ValueError, match="implementation 'fast'"):
        attend(name="fast")
    with pytest.raises(ValueError, match="k and v must agree"):
        attend(v=case.v_TGD[:, :1])
    with pytest.raises(ValueError, match="20 tokens of the selection's query layout"):
        attend(q=case.q_THD[:9])
    with pytest.raises(ValueError, match="no multiple"):
        attend(q=case.q_THD[:, :3])
    with pytest.raises(ValueError, match="must share one of float16"):
        attend(q=case.q_THD.double())
    with pytest.raises(ValueError, match="must share one of float16"):
        attend(q=case.q_THD.int(), k=case.k_TGD.int(), v=case.v_TGD.int())
    with pytest.raises(ValueError, match=r"must be \[3 rows, 1 heads, length\]"):
        attend(k=case.k_TGD[:, :1], v=case.v_TGD[:, :1])
    with pytest.raises(ValueError, match="must be \\[tokens, heads, head dim\\]"):
        attend(q=case.q_THD[0])
    with pytest.raises(ValueError, match="must share one"):
        attend(q=case.q_THD.to("meta"))
    other = packed_layout([0, 20], 2 * BLOCK, "cpu")
    with pytest.raises(ValueError, match="8 tokens for queries and of 16 for keys"):
        attend(selection=dataclasses.replace(case.selection, kv_layout=other))
    with pytest.raises(ValueError, match="one own block for each of the 3 query blocks"):
        own_block_N = case.selection.own_block_N[:2]
        attend(selection=dataclasses.replace(case.selection, own_block_N=own_block_N))


@pytest.mark.parametrize("granularity", list(BUILT_IN))
@pytest.mark.parametrize("boundaries", [[0, 21, 48], torch.tensor([0, 21, 48], dtype=torch.int32)])
def test_one_call_is_its_steps(granularity: str, boundaries: list[int] | Tensor) -> None:
    case = _case([0, 21, 48], [2, 3], granularity=granularity)
    one_call = case.run(
        lambda q, k, v: budgeted_attention(
            *(q, k, v, boundaries, [2, 3]),
            block_size=BLOCK,
            softmax_scale=SCALE,
            selection=granularity,
        ),
        torch.float32,
    )
    for a, b in zip(one_call, case.ours("auto", torch.float32), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budgets": [2]}, r"budgets \[2\]: must be .* one for each of the 2 documents"),
        ({"budgets": 0}, "all at least 1"),
        ({"cu_seqlens": [0, 9]}, "with 9 tokens as in the layout"),
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


def test_scale_enters_as_given() -> None:
    """With one key of score s, lse is scale * s."""
    q = torch.full((1, 1, 4), 2.0)
    for implementation in ("blocks", "tokens", "reference"):
        selection = "previous-block" if implementation == "blocks" else "token-kv-head"
        _, lse = budgeted_attention(
            *(q, q, q, [0, 1], 1),
            block_size=BLOCK,
            softmax_scale=0.25,
            selection=selection,
            implementation=implementation,
        )
        assert math.isclose(float(lse), 4.0, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("granularity", "other"), [("previous-block", "blocks"), ("token-kv-head", "tokens")]
)
def test_auto_says_when_it_cannot_take_the_fast_kernels_on_a_gpu(
    granularity: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for a query on a GPU, which this choice only looks at."""
    monkeypatch.setattr(triton_module, "capability_of", lambda _: (9, 0))
    case = make_case([0, 40], [2], block=16, head_dim=64, granularity=granularity)
    selection = case.selection
    half, double = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(40, 2, 64))
        for dtype in (torch.bfloat16, torch.float64)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _resolve("auto", half, selection) == "triton"
    said = f'"{other}" on CUDA: "triton" does not compute in float64: use "{other}"'
    with pytest.warns(UserWarning, match=said):
        assert _resolve("auto", double, selection) == other
    monkeypatch.setattr(triton_module, "capability_of", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    with pytest.warns(UserWarning, match=f'NVIDIA L40S, has 8.9: use "{other}"'):
        assert _resolve("auto", half, selection) == other


def test_the_example_of_the_document_runs() -> None:
    document = Path(__file__).parents[2] / "research" / "kernels.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == (1024, 8, 64)
    assert names["lse"].shape == (1024, 8)
    assert all(names[name].grad.abs().sum() > 0 for name in ("query", "key", "value"))
