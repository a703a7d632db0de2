# SPDX-License-Identifier: Apache-2.0
"""The per-step reduction, on real gloo processes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import PROGRAMS, run_training
from programs.reducing_rank import BUCKETS, RANKS, seen

from sparsebalance_megatron.plan.measurement import Piece, StepMeasurement
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank learnt, with one plan on all ranks and with plans of their own."""
    directory = tmp_path_factory.mktemp("reduced")
    program = (str(PROGRAMS / "reducing_rank.py"), str(directory))
    run_training(RANKS, (), program=program).require_success()
    return directory


def measurements(directory: Path, name: str) -> list[StepMeasurement]:
    paths = [directory / f"{name}-rank{rank}.pt" for rank in range(RANKS)]
    return [torch.load(path, weights_only=False) for path in paths]


def test_all_ranks_learn_the_same_sums(directory: Path) -> None:
    first, second = measurements(directory, "same")
    np.testing.assert_array_equal(first.times_2RPVM[0], second.times_2RPVM[0])
    np.testing.assert_array_equal(first.times_2RPVM[0], [[[[1.0, 2.0]]], [[[2.0, math.nan]]]])
    np.testing.assert_array_equal(first.times_2RPVM[1], [[[[10.0, 20.0]]], [[[11.0, 21.0]]]])
    np.testing.assert_array_equal(first.schedule_ms, [[40.0], [41.0]])
    assert first.lm_loss == 3.0
    assert first.tokens == 6
    assert first.digest_mismatches == 0
    coverage = first.coverage
    np.testing.assert_array_equal(coverage.counts_LU, [[2, 0, 2], [2, 0, 2]])
    np.testing.assert_allclose(coverage.sums_LUK[:, 0], 2.0)
    np.testing.assert_allclose(coverage.sums_LUK[0, 2], 0.5 + 0.6, rtol=1e-6)
    np.testing.assert_allclose(coverage.sums_LUK[1, 2], 0.51 + 0.61, rtol=1e-6)
    np.testing.assert_allclose(coverage.executed_L, [2 + 0.5 + 0.6, 2 + 0.51 + 0.61], rtol=1e-6)
    assert coverage.count == 8
    assert coverage.executed_sum == pytest.approx(4 + 0.5 + 0.6 + 0.51 + 0.61)
    assert coverage.base_sum == pytest.approx(coverage.executed_sum + 4 * 0.05)
    assert coverage.minimum == pytest.approx(0.5)
    assert coverage.grown == 2


def test_a_differing_plan_is_counted_on_every_rank(directory: Path) -> None:
    found = measurements(directory, "own")
    assert [measured.digest_mismatches for measured in found] == [1, 1]


def test_observations_keep_their_place_without_padding() -> None:
    observed = ObservedCoverage.gather(seen(1, layer) for layer in (0, 1))
    assert observed.pieces == (Piece(0, 0, 2), Piece(1, 1, 2))
    np.testing.assert_array_equal(observed.group_O(BUCKETS), [0, 2, BUCKETS, BUCKETS + 2])
    np.testing.assert_allclose(
        observed.executed_and_grown(), [[1.0, 0], [0.6, 1], [1.0, 0], [0.61, 1]], rtol=1e-6
    )
    nothing = ObservedCoverage.gather([])
    assert nothing.executed_and_grown().shape == (0, 2)
    assert nothing.group_O(BUCKETS).shape == (0,)
