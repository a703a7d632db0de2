# SPDX-License-Identifier: Apache-2.0
"""The kernels' check of themselves: what is right passes, what is slightly wrong does not."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels import blocks, dense, tokens
from sparsebalance_megatron.attention.kernels.contract import Inputs
from sparsebalance_megatron.attention.select import block_topk
from sparsebalance_megatron.attention.self_check import Verdict, check_attention
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.selector_registry import BUILT_IN

CONFIG = SparseBalanceConfig(block_size=32)
RESULTS_OF_LISTS = {"out", "lse", "dq", "dk", "dv", "lists", "coverage"}


def _checked(
    dtype: str = "bfloat16",
    selection: str = "token-query-head",
    config: SparseBalanceConfig = CONFIG,
) -> Verdict:
    return check_attention(
        dataclasses.replace(config, selection=selection),
        heads=(8, 2),
        head_dims=(32, 32),
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )


def _problems(**choices: str) -> list[str]:
    return _checked(**choices).problems()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("selection", sorted(BUILT_IN))
def test_right_kernels_pass(selection: str, dtype: str) -> None:
    verdict = _checked(dtype, selection)
    assert verdict.problems() == []
    dense_results = {f"dense {name}" for name in ("out", "lse", "dq", "dk", "dv")}
    assert verdict.errors.keys() == RESULTS_OF_LISTS | dense_results
    # Far enough from the tolerance that another compiler's rounding passes too.
    assert max(verdict.errors.values()) < 0.5


def _rows(share: float, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of the last rows alone."""

    def changed(x: Tensor) -> Tensor:
        some = slice(-max(1, int(share * len(x))), None)
        return x.index_copy(0, torch.arange(len(x))[some], change(x[some]))

    return changed


RESULTS = {
    "one row of a tensor": _rows(0.0, lambda x: 1.5 * x + 0.1),
    "a hundredth of the rows": _rows(0.01, lambda x: 1.2 * x + 0.1),
    "all rows": lambda x: 1.1 * x + 0.05,
    "other heads": lambda x: x.roll(1, 1),
    "zeros": _rows(0.05, torch.zeros_like),
    "one NaN": lambda x: x.index_fill(0, torch.tensor([3]), torch.nan),
}


@pytest.mark.parametrize("change", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("place", range(5), ids=["out", "lse", "dq", "dk", "dv"])
def test_a_wrong_result_is_found(
    place: int, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "forward" if place < 2 else "backward"
    right, at = getattr(tokens, name), place if place < 2 else place - 2

    def wrong(*arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        results = list(right(*arguments, **keywords))
        results[at] = change(results[at])
        return tuple(results)

    monkeypatch.setattr(tokens, name, wrong)
    expected = ("out", "lse", "dq", "dk", "dv")[place]
    assert any(problem.startswith(f"{expected} ") for problem in _problems())


CHANGES = {
    "a block is left out": lambda s, scale: ({"counts_QC": (s.counts_QC - 1).clamp(min=1)}, scale),
    "heads are swapped": lambda s, scale: ({"indices_QCK": s.indices_QCK.flip(1)}, scale),
    "a block is read past the list's end": lambda s, scale: (
        {"counts_QC": s.counts_QC.clamp(max=1)},
        scale,
    ),
    "the scale is wrong": lambda s, scale: ({}, 1.02 * scale),
}


@pytest.mark.parametrize(
    ("selection", "change"),
    [
        *itertools.product(("token-query-head", "previous-block"), CHANGES),
        ("vertical-slash", "columns are left out"),
    ],
)
def test_a_kernel_that_reads_other_keys_or_scales_otherwise_is_found(
    selection: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES | {"columns are left out": lambda _, scale: ({"columns": None}, scale)}
    kernel = tokens if selection == "token-query-head" else blocks
    right = kernel.forward

    def wrong(given: Inputs) -> Any:
        changed, scale = changes[change](given.selection, given.softmax_scale)
        lists = dataclasses.replace(given.selection, **changed)
        return right(dataclasses.replace(given, selection=lists, softmax_scale=scale))

    monkeypatch.setattr(kernel, "forward", wrong)
    assert _problems(selection=selection)


@pytest.mark.parametrize("wrong", ["lists", "coverage"])
def test_a_wrong_router_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = block_topk.rank_in_chunks

    def ranked(*arguments: Any, router: str, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        lists_QCK, mass_SK = right(*arguments, router=router, **keywords)
        if router == "auto" and wrong == "lists":
            lists_QCK[-8:, :, 1:] = lists_QCK[-8:, :, 1:].clamp(min=3) - 1
        if router == "auto" and wrong == "coverage" and mass_SK is not None:
            mass_SK[:, 0] *= 0.99
        return lists_QCK, mass_SK

    monkeypatch.setattr(block_topk, "rank_in_chunks", ranked)
    assert [problem.split()[0] for problem in _problems()] == [wrong]


def test_dense_documents_are_checked_where_they_are_attended_to_densely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _checked().dense_kernel == "torch"
    lists = dataclasses.replace(CONFIG, attention="reference")
    verdict = _checked(config=lists)
    assert verdict.dense_kernel == "lists" and verdict.errors.keys() == RESULTS_OF_LISTS
    right = dense.backward
    for wrong in (lambda x: 1.1 * x, lambda x: x.index_fill(0, torch.tensor([3]), torch.nan)):
        monkeypatch.setattr(
            dense, "backward", lambda *given, f=wrong: (*right(*given)[:2], f(right(*given)[2]))
        )
        (problem,) = _problems()
        assert problem.startswith("dense dv is off by")
