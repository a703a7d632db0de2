# SPDX-License-Identifier: Apache-2.0
"""The simulator's benchmark in its short form writes what the committed results hold."""

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
    path = tmp_path / "pipeline_reality.json"
    program = str(BENCHMARKS / "pipeline_reality.py")
    monkeypatch.setattr("sys.argv", [program, "--quick", "--json", str(path)])
    runpy.run_path(program, run_name="__main__")
    found = json.loads(path.read_text())
    assert (found["stages"], found["steps"]) == (2, 2)
    assert found["from_measured_times"]["p95_absolute_error"] > 0.0
    committed = BENCHMARKS / "results" / "pipeline_reality.json"
    assert keys(found) == keys(json.loads(committed.read_text()))
