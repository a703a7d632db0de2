# SPDX-License-Identifier: Apache-2.0
"""Generated lengths have the published shape and are a pure function of the seed."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebalance_megatron.predict.lengths import (
    GENERATORS,
    MAX_TOKENS,
    chatqa2_like,
    longalign_like,
    read_lengths,
    samples_of,
)


@pytest.mark.parametrize("name", GENERATORS)
def test_seeded_and_in_range(name):
    generate = GENERATORS[name]
    lengths = generate(5000, 3)
    assert lengths.dtype == np.int64
    assert 1 <= lengths.min() <= lengths.max() <= MAX_TOKENS
    assert (generate(5000, 3) == lengths).all()
    assert (generate(5000, 4) != lengths).mean() > 0.9


def test_longalign_matches_the_published_fit():
    lengths = longalign_like(200_000, 0)
    assert lengths.min() >= 8192
    assert 22_000 <= lengths.mean() <= 23_500
    assert 0.58 <= (lengths >= 16384).mean() <= 0.62
    assert 0.18 <= (lengths >= 32768).mean() <= 0.22


def test_chatqa2_is_bimodal():
    lengths = chatqa2_like(100_000, 0)
    assert (lengths < 4096).mean() == pytest.approx(0.5, abs=0.01)
    assert (lengths >= 16384).mean() == pytest.approx(0.5, abs=0.01)
    assert 0.95 * 32768 < lengths.max() <= 32768


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
