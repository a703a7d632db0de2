# SPDX-License-Identifier: Apache-2.0
"""Coverage curves: the grid, averaging, lookups, floors, state."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import coverage_curves

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.coverage import (
    CoverageCurves,
    budget_grid,
    least_feasible_budget,
    length_bucket,
)


@given(st.integers(1, 5000))
def test_grid(max_blocks):
    grid = budget_grid(max_blocks)
    assert grid[: min(8, max_blocks)] == tuple(range(1, min(8, max_blocks) + 1))
    assert grid[-1] == max_blocks
    steps = list(itertools.pairwise(grid))
    assert all(low < high <= max(low + 1, 1.3 * low) for low, high in steps)


def test_grid_needs_a_block():
    with pytest.raises(PlanError, match="max_blocks 0"):
        budget_grid(0)


def test_length_bucket():
    blocks = np.array([1, 2, 3, 4, 7, 8, 511, 512, 2**40 - 1, 2**40])
    expected = [0, 1, 1, 2, 2, 3, 8, 9, 39, 40]
    assert length_bucket(blocks).tolist() == expected


def test_first_observation_whole_then_exponential():
    curves = CoverageCurves(1, 4, 0.75)
    first, second = np.array([0.1, 0.2, 0.3, 1.0]), np.array([0.5, 0.6, 0.7, 1.0])
    sums = np.full(curves.mean_LUK.shape, np.nan)
    counts = np.zeros(curves.observed_LU.shape)
    sums[0, 1], counts[0, 1] = first * 4, 4
    curves.observe(sums, counts)
    assert curves.mean_LUK[0, 1] == pytest.approx(first)
    assert curves.observed_LU.tolist() == [[False, True, False]]
    sums[0, 1], counts[0, 1] = second * 2, 2
    curves.observe(sums, counts)
    assert curves.mean_LUK[0, 1] == pytest.approx(0.75 * first + 0.25 * second)
    before = curves.mean_LUK.copy()
    curves.observe(sums, np.zeros_like(counts))
    assert (curves.mean_LUK == before).all()


def test_broken_updates():
    curves = CoverageCurves(3, 16, 0.5)
    sums, counts = np.ones(curves.mean_LUK.shape), np.ones(curves.observed_LU.shape)
    sums[2, 3, 1], sums[0, 1, 0] = np.nan, np.inf
    curves.observe(sums, counts)
    assert np.argwhere(~curves.observed_LU).tolist() == [[0, 1], [2, 3]]
    assert (curves.mean_LUK == curves.observed_LU[..., None]).all()


@given(st.integers(0, 999), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_lookup_matches_naive(seed, blocks):
    curves = coverage_curves(3, 40, seed=seed)
    budgets = np.random.default_rng(seed).integers(1, 45, (3, len(blocks)))
    found = curves.coverage_LS(np.array(blocks), budgets)
    for layer in range(3):
        for sample, n in enumerate(blocks):
            values = curves.mean_LUK[layer, int(np.log2(n))].tolist()
            expected = oracle.interpolate(curves.grid, values, budgets[layer, sample], n)
            assert found[layer, sample] == pytest.approx(expected, abs=1e-12)
    dense = curves.curves_LSK(np.array(blocks))
    for column, budget in enumerate(curves.grid):
        assert dense[:, :, column] == pytest.approx(
            curves.coverage_LS(np.array(blocks), np.array(budget))
        )


def test_unobserved_is_nan_but_dense_is_one():
    curves = CoverageCurves(2, 16, 0.5)
    assert np.isnan(curves.coverage(0, 16, 15))
    assert curves.coverage(1, 16, 16) == 1.0


@given(
    st.integers(0, 999),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 45),
    st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.99]),
)
def test_floor_is_the_least_feasible(seed, blocks, base, threshold):
    curves = coverage_curves(3, 40, seed=seed)
    floor = least_feasible_budget(curves, np.array(blocks), np.full(3, base), threshold)
    for layer in range(3):
        for sample, n in enumerate(blocks):
            values = curves.mean_LUK[layer, int(np.log2(n))].tolist()
            exact = oracle.least_budget(curves.grid, values, n, base, threshold)
            k, k0 = floor[layer, sample], min(base, n)
            reached = oracle.interpolate(curves.grid, values, k, n)
            assert reached >= oracle.interpolate(curves.grid, values, k0, n) - threshold - 1e-12
            assert abs(k - exact) <= 1, "rounding may move the exact crossing by one block"
            assert 1 <= k <= k0


def test_state_of_another_job():
    state = coverage_curves(3, 40).state_dict()
    with pytest.raises(PlanError, match=r"grid \[1, 2.* 40\], this job \[1, 2.*64\]"):
        CoverageCurves(3, 64, 0.9).load_state_dict(state)
    with pytest.raises(PlanError, match=r"\(3, 6, 16\).*\(4, 6, 16\)"):
        CoverageCurves(4, 40, 0.9).load_state_dict(state)


def test_overlong_document():
    with pytest.raises(PlanError, match="41 blocks"):
        coverage_curves(3, 40).coverage(0, 41, 5)
    with pytest.raises(PlanError, match="budget 0"):
        coverage_curves(3, 40).coverage(0, 40, 0)
