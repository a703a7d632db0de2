# SPDX-License-Identifier: Apache-2.0
"""The network sorts: every 0-1 sequence of up to 8 places, and random numbers of more."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparsebalance_megatron.attention.select.row_ranking import sort_falling_


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_every_sequence_of_zeros_and_ones_is_sorted(places: int) -> None:
    """By the 0-1 principle (Knuth, section 5.3.4) any numbers are."""
    x_1WY = torch.tensor(list(itertools.product([0.0, 1.0], repeat=places))).t()[None].contiguous()
    expected_1WY = x_1WY.sort(dim=1, descending=True).values
    sort_falling_(x_1WY, torch.empty(x_1WY.numel()))
    assert torch.equal(x_1WY, expected_1WY)


@pytest.mark.parametrize("places", [16, 64, 512])
def test_random_numbers_are_sorted(places: int) -> None:
    x_AWY = torch.randn(2, places, 5, generator=torch.Generator().manual_seed(places))
    expected_AWY = x_AWY.sort(dim=1, descending=True).values
    sort_falling_(x_AWY, torch.empty(x_AWY.numel() // 2))
    assert torch.equal(x_AWY, expected_AWY)


def test_other_than_powers_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="6 places"):
        sort_falling_(torch.zeros(1, 6, 1), torch.empty(6))
