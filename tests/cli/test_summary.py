# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs: numbers by hand, the table's width, the JSON's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_cases import FIGURES, HEADER, step_line, step_record
from view.report.sample_run import write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.numbers import compare, summarize


def step(iteration: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {"lm_loss": 9.0, "figures": {"lower_bound_ms": 60.0}}
    return step_record(iteration, **(values | changes))


def log(name: str, *steps: StepRecord, problems: tuple[str, ...] = ()) -> RunLog:
    return RunLog(directory=Path(name), header=None, steps=steps, problems=problems)


@pytest.mark.parametrize(("steps", "skipped"), [(1, 0), (4, 0), (5, 1), (24, 4), (25, 5), (90, 5)])
def test_warm_up(steps: int, skipped: int) -> None:
    times_ms = [1000.0] * skipped + [10.0] * (steps - skipped)
    run = summarize([step(i + 1, iteration_ms=ms) for i, ms in enumerate(times_ms)])
    assert (run.iteration_ms_median, run.warm_up_steps) == (10.0, skipped)


def test_numbers_of_a_run() -> None:
    run = summarize(
        [
            step(1, lm_loss=9.5),
            step(2, figures={"coverage": 0.5, "imbalance": 1.25}, iteration_ms=110.0),
            step(3, figures={"busiest_rank_ms_predicted": 100.0, "predicted_error": 0.1}),
            step(4, lm_loss=8.25, figures={"imbalance": 1.5, "predicted_error": 0.3}),
        ]
    )
    assert run.iteration_ms_median == 100.0
    assert (run.loss_first, run.loss_last) == (9.5, 8.25)
    assert run.figures["imbalance"] == pytest.approx(1.125)
    assert run.figures["coverage"] == pytest.approx(0.6875)
    assert run.figures["predicted_error"] == pytest.approx(0.65)
    assert run.figures["busiest_rank_ms_predicted"] == 90.0
    assert run.figures["lower_bound_ms"] == 70.0


def test_unmeasured_is_none_and_not_zero() -> None:
    names = ("coverage", "coverage_base", "imbalance", "predicted_error", "work_ratio")
    busiest = ("busiest_rank_ms_measured", "busiest_rank_ms_predicted", "lower_bound_ms")
    unknown = dict.fromkeys((*names, *busiest))
    run = summarize([step(1, iteration_ms=None, lm_loss=None, figures=unknown)])
    for name in ("iteration_ms_median", "loss_first", "loss_last"):
        assert getattr(run, name) is None
    assert {run.figures[name] for name in unknown} == {None}


@pytest.mark.parametrize(
    ("slow", "fast", "speedup", "problem"),
    [
        ({1: None, 2: 100, 3: 200, 4: 300}, {1: None, 2: 50, 3: 160, 4: 100}, 600 / 310, ""),
        # Pairs are of the same iteration.
        ({1: 100, 2: 100, 3: 900}, {1: 100, 3: 300}, 1000 / 400, "3 steps in slow, 2 in fast"),
        # 65 ms stands for a step of other samples, of which there is no speedup.
        ({1: 100, 2: 100}, {1: 100, 2: 65}, None, "differ in 1 of 2 steps, first in iteration 2"),
    ],
)
def test_speedup_of_all_steps(
    slow: dict[int, float], fast: dict[int, float], speedup: float | None, problem: str
) -> None:
    logs = [
        log(name, *(step(i, iteration_ms=ms, tokens=64 + (ms == 65)) for i, ms in times.items()))
        for name, times in (("slow", slow), ("fast", fast))
    ]
    found = compare(*logs)
    assert found.speedup == (None if speedup is None else pytest.approx(speedup))
    assert problem in "".join(found.problems) and bool(problem) == bool(found.problems)


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
