# SPDX-License-Identifier: Apache-2.0
"""Coverage curves, and looking coverage up."""

from __future__ import annotations

import pytest
import torch

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select.ranking import coverage_at, curves_of_mass


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
