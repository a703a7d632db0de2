# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs: the table's width, the JSON's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from record_cases import FIGURES, HEADER, step_line
from view.report.sample_run import write_lines

from sparsebalance_megatron import cli


def write_log(directory: Path, iteration_ms: float) -> None:
    directory.mkdir()
    figures = {
        "busiest_rank_ms_predicted": 8e3,
        "busiest_rank_ms_measured": 9e3,
        "imbalance": 1.125,
        "lower_bound_ms": 7e3,
        "work_ratio": 0.98,
        "coverage": 0.9876,
        "coverage_base": None,
    }
    records = [HEADER] + [
        step_line(
            iteration,
            iteration_ms=iteration_ms if iteration > 1 else None,
            lm_loss=9.0 - 0.1 * iteration,
            figures=FIGURES | figures,
        )
        for iteration in range(1, 31)
    ]
    write_lines(directory / "steps.jsonl", records)


def test_command_writes_json_and_an_80_column_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    times_ms = {"baseline": 10450.0, "dense": 19000.0, "by_tokens": 9900.0, "balanced": 9500.0}
    for name, iteration_ms in times_ms.items():
        write_log(tmp_path / name, iteration_ms)
    output = tmp_path / "new" / "summary.json"
    runs = ("--baseline", str(tmp_path / "baseline"), "--run", str(tmp_path / "balanced"))
    words = ("summary", *runs, "-o", str(output))
    assert cli.main(words) == 0
    written = json.loads(output.read_text())
    compared = {"baseline", "sparse_balance", "speedup", "problems", "explanation", "differences"}
    assert set(written) == compared
    required = {"iteration_ms_median", "loss_first", "loss_last", "figures"}
    assert required <= set(written["baseline"]) == set(written["sparse_balance"])
    assert written["speedup"] == pytest.approx(1.1)
    assert written["baseline"]["loss_last"] == pytest.approx(6.0)
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if not line.startswith("written to")]
    assert max(map(len, table)) <= 80 and "…" not in printed
    numbers = ("10,450", "9,500", "1.125", "98.0%", "0.9876", "8.9000", "6.0000")
    assert all(text in printed for text in (*numbers, "1.10 times as fast"))

    assert cli.main((*words, "--beside", str(tmp_path / "dense"), str(tmp_path / "by_tokens"))) == 0
    beside = json.loads(output.read_text())["beside"]
    speedups = {name: other["speedup"] for name, other in beside.items()}
    assert speedups == pytest.approx({"dense": 2.0, "by_tokens": 9900.0 / 9500.0})
    printed = capsys.readouterr().out
    assert "2.00 times as fast as dense" in printed and "1.04 times as fast as by_tokens" in printed
    assert "by_tokens" in next(line for line in printed.splitlines() if line.startswith("   "))
