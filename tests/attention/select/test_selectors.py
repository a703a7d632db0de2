# SPDX-License-Identifier: Apache-2.0
"""What every built-in selector promises, whatever it ranks by; coverage curves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.cases import SELECTORS

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence
from sparsebalance_megatron.attention.select.ranking import Ranking, coverage_at, curves_of_mass

LAYOUT = packed_layout([0, 21, 120, 157], 8, "cpu")
every_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


def _ranking(selector: Any, *, max_budget: int = 99, observe: bool = True) -> Ranking:
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD = (torch.randn(157, heads, 8, generator=generator) for heads in (4, 2))
    return rank_sequence(
        selector, *(q_THD, k_TGD, LAYOUT), softmax_scale=0.8, max_budget=max_budget, observe=observe
    )


@every_selector
def test_budgets_outside_the_ranking_count_as_its_ends(selector: Any) -> None:
    ranking = _ranking(selector, max_budget=4)
    outside, inside = (
        selector.select(ranking, torch.tensor(budgets)) for budgets in ([0, 99, -7], [1, 4, 1])
    )
    assert outside.counts_QC.min() == 1
    assert all(map(torch.equal, outside.tensors(), inside.tensors()))


@every_selector
def test_coverage_needs_observation(selector: Any) -> None:
    unseen = _ranking(selector, observe=False)
    assert unseen.mass_SK is None
    with pytest.raises(ValueError, match="observe=True"):
        selector.coverage(unseen)


@every_selector
def test_budgets_that_do_not_fit_are_named(selector: Any) -> None:
    with pytest.raises(ValueError, match="max_budget 0: must be at least 1 block"):
        _ranking(selector, max_budget=0)
    with pytest.raises(ValueError, match="each of the 3 documents"):
        selector.select(_ranking(selector), torch.tensor([3]))


def test_coverage_lookup_reads_the_ends_outside() -> None:
    curves_SK = torch.tensor([[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]])
    assert coverage_at(curves_SK, torch.tensor([1, 9], dtype=torch.int32)).tolist() == [0.5, 1.0]
    grid_SK = torch.tensor([0, 2, 4]).expand(2, -1)
    assert coverage_at(curves_SK, grid_SK).tolist() == [[0.5, 0.75, 1.0], [0.25, 0.5, 1.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_mass_that_is_not_finite_stays_in_its_document(value: float) -> None:
    layout = packed_layout([0, 40, 60, 100], 10, "cpu")
    mass_SK = torch.rand(layout.documents, 4, dtype=torch.float64) * 5.0
    broken_SK = mass_SK.clone()
    broken_SK[1, 1] = value
    curves_SK = curves_of_mass(mass_SK, layout, selecting_heads=1)
    broken_SK = curves_of_mass(broken_SK, layout, selecting_heads=1)
    assert broken_SK[1].isnan().all()
    assert torch.equal(broken_SK[[0, 2]], curves_SK[[0, 2]])
