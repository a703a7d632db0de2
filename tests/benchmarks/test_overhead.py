# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark in its short form writes what the committed results hold."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from harness import REPOSITORY
from json_shape import keys

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.mark.distributed
def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "overhead.json"
    program = str(BENCHMARKS / "overhead.py")
    monkeypatch.setattr("sys.argv", [program, "--quick", "--json", str(path)])
    runpy.run_path(program, run_name="__main__")
    found = json.loads(path.read_text())
    assert found["steps"] == 2
    assert found["iteration_ms"]["median"] > found["overhead_ms"]["median"] > 0.0
    for name in ("overhead.json", "overhead_xeon.json"):
        assert keys(found) == keys(json.loads((BENCHMARKS / "results" / name).read_text()))
