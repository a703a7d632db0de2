# SPDX-License-Identifier: Apache-2.0
"""Numbers of a search are those of splitmix64, which every rank counts alike."""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.search.state import Numbers


def splitmix64(seed, count):
    """The definition of splitmix64 in Python's integers."""
    mask, found = (1 << 64) - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        found.append(mixed ^ (mixed >> 31))
    return found


def test_numbers_are_splitmix64():
    numbers = Numbers()
    assert [*numbers.draw(3).tolist(), *numbers.draw(4).tolist()] == splitmix64(0, 7)
    assert splitmix64(0, 1) == [0xE220A8397B1DCDAF]


def test_numbers_below_a_limit_are_even():
    numbers, limits = Numbers(), np.array([1, 2, 3, 10] * 3000)
    found = numbers.below(limits, len(limits)).reshape(-1, 4)
    for column, limit in zip(found.T, (1, 2, 3, 10), strict=True):
        counts = np.bincount(column, minlength=limit)
        assert len(counts) == limit
        assert abs(counts - 3000 / limit).max() < 5 * (3000 / limit) ** 0.5
