# SPDX-License-Identifier: Apache-2.0
"""The planning benchmark in its short form; every benchmark's command line."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from json_shape import keys

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(
    path.name
    for path in BENCHMARKS.glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text("utf-8")
)
RESULTS = BENCHMARKS / "results" / "planning.json"


def test_the_short_form_writes_what_the_long_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planning.json"
    program = str(BENCHMARKS / "planning.py")
    monkeypatch.setattr("sys.argv", [program, "--quick", "--json", str(path)])
    runpy.run_path(program, run_name="__main__")
    found = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert keys(found) == keys(json.loads(RESULTS.read_text()))
    for row in (*found["goals"], *found["samples_on_8_ranks"], *found["16_samples_per_rank"]):
        assert all(row[name]["cpu_ms"] > 0.0 for name in ("arrival", "makespan"))
    assert all(row["bound_ratio_median"] >= 1.0 - 1e-9 for row in found["bound"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its imports and its parser work."""
    monkeypatch.setattr("sys.argv", [str(BENCHMARKS / name), "--help"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_no_benchmark_is_missed() -> None:
    assert len(COMMANDS) >= 7
