# SPDX-License-Identifier: Apache-2.0
"""Lengths from files, and the samples that they make."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebalance_megatron.predict.workload import read_lengths, samples_of


@pytest.mark.parametrize("text", ["[5, 7, 9]", "5\n7\n9\n", "5 7\n\n9"])
def test_files(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).tolist() == [5, 7, 9]


@pytest.mark.parametrize(
    ("overlong", "samples"),
    [("split", [100, 100, 20, 50]), ("truncate", [100, 100, 50]), ("drop", [100, 50])],
)
def test_documents_longer_than_the_sequence(overlong, samples):
    assert samples_of(np.array([100, 120, 50]), 100, overlong).tolist() == samples
