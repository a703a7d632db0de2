# SPDX-License-Identifier: Apache-2.0
"""The recomputation benchmark runs, finds equal gradients, and says what is kept."""

from __future__ import annotations

import json
from pathlib import Path

from harness import REPOSITORY, run_program


def test_quick(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    program = (str(REPOSITORY / "benchmarks" / "recompute.py"), "--quick", "--json", str(path))
    run = run_program(program, tmp_path)
    assert run.returncode == 0, run.stderr
    results = json.loads(path.read_text())
    assert results["gradients_equal"] is True
    assert results["median_ms"].keys() == {"keep", "again"}
    assert results["again_over_keep"].keys() == {"median", "p25", "p75"}
    # 4 heads of 32 numbers and a log-sum-exp each; two lists of 8 places and their lengths.
    assert results["kept_bytes_per_token_and_layer"] == 4 * (4 * 32 + 4 + 4 * (8 + 1))
