# SPDX-License-Identifier: Apache-2.0
"""Rows of equal height, against all ways to put a few samples into bins."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.plan.search.rows import packed_rows

SEEDS = st.integers(0, 2**32 - 1)


def drawn(samples, seed):
    """Weights that grow with the square of the lengths, and the lengths."""
    generator = np.random.default_rng(seed)
    tokens_S = np.exp(generator.uniform(0, 5, samples)).astype(int) + 1
    return tokens_S * (1.0 + tokens_S / 20), tokens_S


def least_heights(weights_S, tokens_S, rows, members, cap_tokens):
    """The least sum of heights of all assignments without an empty bin; None where there is
    none."""
    best = None
    for bins in product(range(rows * members), repeat=len(weights_S)):
        load_J = np.bincount(bins, weights_S, rows * members)
        if load_J.min() == 0.0:
            continue
        if np.bincount(bins, tokens_S, rows * members).max() > cap_tokens:
            continue
        height = load_J.reshape(rows, members).max(axis=1).sum()
        best = height if best is None else min(best, height)
    return best


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_sum_of_heights_is_near_the_least(shape, more):
    """Single cases of two rows of two bins may be 1.4 times the least."""
    rows, members = shape
    ratios = []
    for seed in range(20):
        weights_S, tokens_S = drawn(rows * members + more, seed)
        packing = packed_rows(weights_S, tokens_S, rows, members, 1 << 40)
        packing.improve()
        least = least_heights(weights_S, tokens_S, rows, members, 1 << 40)
        ratios.append(packing.heights_X.sum() / least)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) <= (1.06 if more else 1 + 1e-12)


@given(
    SEEDS, st.integers(1, 60), st.integers(1, 5), st.integers(1, 8), st.floats(0.3, 3.0), st.data()
)
def test_every_sample_has_one_bin_under_the_cap_and_no_bin_is_empty(
    seed, samples, rows, members, room, data
):
    weights_S, tokens_S = drawn(samples, seed)
    mean_tokens = tokens_S.sum() / (rows * members)
    cap_tokens = max(1, int(room * mean_tokens) + data.draw(st.integers(0, 150)))
    packing = packed_rows(weights_S, tokens_S, rows, members, cap_tokens)
    if samples < rows * members or tokens_S.max() > cap_tokens:
        assert packing is None
    if packing is None:
        return
    filled = packing.heights_X.sum()
    packing.improve()
    assert packing.heights_X.sum() <= filled * (1 + 1e-12)
    bins = [each for row in packing.samples for each in row]
    assert [len(row) for row in packing.samples] == [members] * rows
    assert sorted(sample for each in bins for sample in each) == [*range(samples)]
    assert all(bins)
    for each, load, used in zip(bins, packing.load_J, packing.used_J, strict=True):
        assert load == pytest.approx(weights_S[list(each)].sum(), rel=1e-9)
        assert used == tokens_S[list(each)].sum() <= cap_tokens


def test_samples_that_a_cap_keeps_apart_are_apart():
    weights_S, tokens_S = np.array([9.0, 8.0, 1.0, 1.0]), np.array([60, 50, 50, 40])
    packing = packed_rows(weights_S, tokens_S, 1, 2, 100)
    packing.improve()
    assert sorted(map(sorted, packing.samples[0])) == [[0, 3], [1, 2]]
    assert packed_rows(weights_S, tokens_S, 1, 2, 99) is None


@pytest.mark.parametrize(("evenly", "loads"), [(False, [9, 5, 1]), (True, [9, 3, 3])])
def test_bins_below_the_height_of_their_row_are_filled_or_even(evenly, loads):
    weights_S = np.array([9.0, 1, 1, 1, 1, 1, 1])
    packing = packed_rows(weights_S, np.ones(7, dtype=int), 1, 3, 9, evenly=evenly)
    assert packing.load_J.tolist() == loads
