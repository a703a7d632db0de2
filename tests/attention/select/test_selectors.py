# SPDX-License-Identifier: Apache-2.0
"""What every built-in selector promises, whatever it ranks by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.cases import SELECTORS
from torch import Tensor

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence
from sparsebalance_megatron.attention.select.ranking import Ranking
from sparsebalance_megatron.attention.selection import Selection

LAYOUT = packed_layout([0, 21, 120, 157], 8, "cpu")
every_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


def _ranking(
    selector: Any, *, max_budget: int = 99, observe: bool = True, requires_grad: bool = False
) -> Ranking:
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD = (
        torch.randn(157, heads, 8, generator=generator).requires_grad_(requires_grad)
        for heads in (4, 2)
    )
    return rank_sequence(
        selector, *(q_THD, k_TGD, LAYOUT), softmax_scale=0.8, max_budget=max_budget, observe=observe
    )


def _tensors(found: Ranking | Selection) -> list[Tensor]:
    names = ("indices_QCK", "columns_NGX", "mass_SK", "counts_QC")
    tensors = [getattr(found, name, None) for name in names]
    columns = getattr(found, "columns", None)
    tensors += [columns.tokens_NGK, columns.counts_NG] if columns is not None else []
    return [x for x in tensors if x is not None]


@every_selector
def test_budgets_outside_the_ranking_count_as_its_ends(selector: Any) -> None:
    ranking = _ranking(selector, max_budget=4)
    outside, inside = (
        selector.select(ranking, torch.tensor(budgets)) for budgets in ([0, 99, -7], [1, 4, 1])
    )
    assert outside.counts_QC.min() == 1
    assert all(map(torch.equal, _tensors(outside), _tensors(inside)))


@every_selector
def test_a_second_pass_repeats_every_bit_and_carries_no_gradient(selector: Any) -> None:
    first, second = (_ranking(selector, requires_grad=each) for each in (False, True))
    assert len(_tensors(first)) == len(_tensors(second)) >= 2
    assert all(map(torch.equal, _tensors(first), _tensors(second)))
    assert not selector.coverage(second).requires_grad


@every_selector
def test_observing_changes_no_list(selector: Any) -> None:
    seen, unseen = (_ranking(selector, observe=observe) for observe in (True, False))
    assert unseen.mass_SK is None and seen.mass_SK is not None
    assert all(map(torch.equal, _tensors(unseen), _tensors(seen)))
    with pytest.raises(ValueError, match="observe=True"):
        selector.coverage(unseen)


@every_selector
def test_budgets_that_do_not_fit_are_named(selector: Any) -> None:
    with pytest.raises(ValueError, match="max_budget 0: must be at least 1 block"):
        _ranking(selector, max_budget=0)
    with pytest.raises(ValueError, match="each of the 3 documents"):
        selector.select(_ranking(selector), torch.tensor([3]))
