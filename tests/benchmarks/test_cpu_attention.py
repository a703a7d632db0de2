# SPDX-License-Identifier: Apache-2.0
"""The CPU benchmark runs, and compares every case with dense attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import cpu_attention
import pytest
import torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The benchmark sets the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_quick(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert cpu_attention.main(["--quick", "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert results["dense"]["min_ms"] > 0
    cases = cpu_attention.CASES
    assert list(results["cases"]) == [case.name for case in cases]
    for case, found in zip(cases, results["cases"].values(), strict=True):
        blocks = 1024 // case.block_size
        read = sum(min(place, case.budget) for place in range(1, blocks + 1))
        assert found["density"] == pytest.approx(2 * read / (blocks * (blocks + 1)))
        assert found["speedup_over_dense"] > 0
        assert ("time_per_pair_over_blocks" in found) == case.selection.startswith("token")
