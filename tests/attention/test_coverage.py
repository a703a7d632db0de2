# SPDX-License-Identifier: Apache-2.0
"""Looking coverage up, and the guard, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance_megatron.attention.coverage import coverage_at, curves_of_mass, guard_budgets
from sparsebalance_megatron.attention.layout import packed_layout


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
    guarded_S, grown_S = guard_budgets(
        broken_SK, torch.tensor([1, 1, 1]), base_budget=4, threshold=0.0
    )
    assert guarded_S[1] == 1
    assert grown_S.tolist() == [True, False, True]


curves = st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=9).map(
    lambda values: [*sorted(values), 1.0]
)


@given(
    curve=curves,
    budget=st.integers(1, 15),
    base_budget=st.integers(1, 15),
    threshold=st.sampled_from([0.0, 1e-9, 0.05, 0.3, 0.99]),
)
@settings(max_examples=200)
def test_guard_keeps_the_floor_and_no_more(
    curve: list[float], budget: int, base_budget: int, threshold: float
) -> None:
    curves_SK = torch.tensor([curve])
    budgets_S = torch.tensor([budget], dtype=torch.int32)
    guarded_S, grown_S = guard_budgets(
        curves_SK, budgets_S, base_budget=base_budget, threshold=threshold
    )
    guarded = int(guarded_S)

    def at(k: int) -> Tensor:
        return curves_SK[0, min(k, len(curve)) - 1]

    floor = at(base_budget) - threshold
    assert at(guarded) >= floor
    assert guarded >= budget
    assert bool(grown_S) == (guarded > budget)
    assert guarded_S.dtype == budgets_S.dtype
    if guarded > budget:
        assert guarded <= base_budget
        assert all(at(k) < floor for k in range(1, guarded))


def test_guard_never_shrinks_where_a_curve_dips() -> None:
    curves_SK = torch.tensor([[0.5, 0.9, 0.9 - 6e-8, 1.0]])
    guarded_S, grown_S = guard_budgets(curves_SK, torch.tensor([3]), base_budget=2, threshold=0.0)
    assert guarded_S.tolist() == [3]
    assert not grown_S.any()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"threshold 1\.0"):
        guard_budgets(torch.ones(1, 3), torch.tensor([1]), base_budget=1, threshold=1.0)
    with pytest.raises(ValueError, match="base_budget 0"):
        guard_budgets(torch.ones(1, 3), torch.tensor([1]), base_budget=0, threshold=0.5)
