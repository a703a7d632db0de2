# SPDX-License-Identifier: Apache-2.0
"""The step log's line of coverage curves: what is written is what is read."""

from __future__ import annotations

import json

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket
from sparsebalance_megatron.telemetry.coverage_record import coverage_record, read_coverage


def test_coverage_curves_are_null_where_nothing_was_observed() -> None:
    curves = CoverageCurves(2, 6, 0.9)
    counts_LU = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    curves.observe(np.full((2, 3, 6), 0.123456789) * counts_LU[..., None], counts_LU)
    record = coverage_record(
        iteration=12, grid=curves.grid, mean_LUK=curves.mean_LUK, observed_LU=curves.observed_LU
    )
    known = [0.12346] * 6
    assert record["curves"] == [[known, None, known], [None, None, known]]
    assert (record["type"], record["iteration"]) == ("coverage", 12)
    assert record["grid"] == [1, 2, 3, 4, 5, 6]
    assert record["bucket_blocks"] == [1, 3, 6]
    for bucket, largest in enumerate(record["bucket_blocks"]):
        assert length_bucket(largest) == bucket
    json.dumps(record, allow_nan=False)


def test_every_field_comes_back() -> None:
    mean_LUK = np.random.default_rng(3).uniform(0.1, 1.0, (2, 3, 4))
    observed_LU = np.array([[True, False, True], [False, True, True]])
    record = coverage_record(
        iteration=22, grid=(1, 2, 4, 6), mean_LUK=mean_LUK, observed_LU=observed_LU
    )
    read = read_coverage(json.loads(json.dumps(record, allow_nan=False)))
    assert (read.iteration, read.grid, read.bucket_blocks) == (22, (1, 2, 4, 6), (1, 3, 6))
    expected_LUK = np.where(observed_LU[..., None], mean_LUK.round(5), np.nan)
    np.testing.assert_array_equal(read.curves_LUK, expected_LUK)
