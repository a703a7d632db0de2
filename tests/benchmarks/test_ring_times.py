# SPDX-License-Identifier: Apache-2.0
"""Rings against sums written out, and against the times that MTraining reports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_times import (
    LAYOUTS,
    Links,
    columns_work,
    diagonals_work,
    flat_ring_ms,
    gathered_ms,
    hierarchical_ring_ms,
    step_imbalance,
    work_of_ranks,
    worker_imbalance,
)

PAPER_LINKS = Links(inner_ms=0.13, outer_ms=0.98, node_ranks=8)
PAPER_STEP_MS = 0.51
PAPER_BEFORE_MS = 1.13 + 2.08
"""Index and host, before the ring begins."""


def test_times_that_mtraining_reports() -> None:
    """Forward attention of 512K tokens on 4 nodes of 8: 34.1 ms flat, 19.53 ms hierarchical."""
    work_ms_WW = np.full((32, 32), PAPER_STEP_MS)
    flat_ms = PAPER_BEFORE_MS + flat_ring_ms(work_ms_WW, PAPER_LINKS)
    hierarchical_ms = PAPER_BEFORE_MS + hierarchical_ring_ms(work_ms_WW, PAPER_LINKS)
    assert flat_ms == pytest.approx(34.10, abs=0.01)
    assert hierarchical_ms == pytest.approx(19.53, abs=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_of_ranks_is_the_sum_over_their_blocks(layout: str) -> None:
    generator = np.random.default_rng(0)
    work_NN = np.tril(generator.random((12, 12)))
    owner_N = LAYOUTS[layout](12, 3)
    assert np.bincount(owner_N).tolist() == [4, 4, 4]
    expected = np.zeros((3, 3))
    for query in range(12):
        for key in range(12):
            expected[owner_N[query], owner_N[key]] += work_NN[query, key]
    np.testing.assert_allclose(work_of_ranks(work_NN, owner_N, 3), expected)


def test_striped_is_how_rows_are_dealt() -> None:
    np.testing.assert_array_equal(LAYOUTS["striped"](13, 4), np.arange(13) % 4)


def test_imbalance_of_a_ring_written_out() -> None:
    work_WW = np.array([[4.0, 1.0], [2.0, 3.0]])
    assert worker_imbalance(work_WW) == 1.0
    # Step 0 is the main diagonal: 4 and 3. Step 1: rank 0 on rank 1's keys, 1, and the other, 2.
    assert step_imbalance(work_WW) == (4.0 + 2.0) / 5.0


@given(st.sets(st.integers(0, 255), min_size=1, max_size=20), st.sampled_from([2, 4, 8]))
def test_striped_ranks_meet_a_diagonal_at_the_same_step(distances: set[int], ranks: int) -> None:
    """They differ by the blocks that lie too near to the row's beginning: one for each diagonal
    and step at most."""
    blocks = 256
    work_NN = diagonals_work(blocks, distances)
    work_WW = work_of_ranks(work_NN, LAYOUTS["striped"](blocks, ranks), ranks)
    rank_W = np.arange(ranks)
    for step in range(ranks):
        works_W = work_WW[rank_W, (rank_W - step) % ranks]
        meeting = sum(distance % ranks == step for distance in distances)
        assert works_W.max() - works_W.min() <= meeting


def test_striped_ranks_meet_a_column_at_different_steps() -> None:
    """Only one rank holds it, so at every step one rank works and the others wait."""
    blocks, ranks = 256, 8
    work_WW = work_of_ranks(columns_work(blocks, [0]), LAYOUTS["striped"](blocks, ranks), ranks)
    assert worker_imbalance(work_WW) == 1.0
    assert step_imbalance(work_WW) == pytest.approx(ranks)


@given(st.integers(0, 1000))
def test_rings_take_at_least_computing_and_travelling(seed: int) -> None:
    generator = np.random.default_rng(seed)
    work_ms_WW = generator.random((8, 8))
    links = Links(inner_ms=0.3 * generator.random(), outer_ms=generator.random(), node_ranks=4)
    busy_ms = work_ms_WW.sum(1).max()
    flat, hierarchical = flat_ring_ms(work_ms_WW, links), hierarchical_ring_ms(work_ms_WW, links)
    gathered = gathered_ms(work_ms_WW, links, 2)
    assert min(flat, hierarchical, gathered) >= busy_ms - 1e-12
    # Seven shares cross the slowest link one after the other.
    assert flat >= 7 * max(links.inner_ms, links.outer_ms) - 1e-12
    free = Links(inner_ms=0.0, outer_ms=0.0, node_ranks=4)
    assert hierarchical >= hierarchical_ring_ms(work_ms_WW, free) - 1e-12
    assert gathered_ms(work_ms_WW, free, 2) == pytest.approx(busy_ms)


def test_a_ring_without_waiting_is_as_slow_as_its_steps() -> None:
    """Free links and equal work: nobody waits; one slow rank at one step is waited for by all that
    its keys reach later."""
    even = np.full((4, 4), 1.0)
    free = Links(inner_ms=0.0, outer_ms=0.0, node_ranks=2)
    assert flat_ring_ms(even, free) == hierarchical_ring_ms(even, free) == 4.0
    even[0, 0] = 3.0
    assert flat_ring_ms(even, free) == 6.0


def test_nodes_must_be_full() -> None:
    with pytest.raises(ValueError, match="6 ranks: must fill nodes of 4"):
        hierarchical_ring_ms(np.ones((6, 6)), Links(inner_ms=1.0, outer_ms=1.0, node_ranks=4))
