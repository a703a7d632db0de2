# SPDX-License-Identifier: Apache-2.0
"""Sentences: what they claim, and that nothing is claimed that was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebalance_megatron.report.comparison import Comparison, RunSummary
from sparsebalance_megatron.report.sentences import comparison_findings, run_findings, subtitle


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = dict.fromkeys(RunSummary.__dataclass_fields__)
    values |= {"steps": 9, "warm_up_steps": 1, "iteration_ms": ()}
    return RunSummary(**(values | changes))


def comparison(run: RunSummary, baseline: RunSummary, **speedups: float | None) -> Comparison:
    values: dict[str, Any] = dict.fromkeys(("speedup", "speedup_paired", "speedup_total"))
    return Comparison(baseline=baseline, sparse_balance=run, problems=(), **(values | speedups))


def test_a_speedup_with_what_it_cost() -> None:
    first, *rest = comparison_findings(
        comparison(
            summary(rank_imbalance=1.02, work_ratio=0.91, coverage_mean=0.69),
            summary(rank_imbalance=1.18, coverage_mean=0.71),
            speedup=1.35,
            speedup_paired=1.17,
            speedup_total=1.25,
        )
    )
    assert first.startswith("Measured: 1.25 times as fast as the baseline in total time")
    assert "1.35 times" in first and "1.17 times" in first
    imbalance, work = rest
    assert imbalance.startswith("Measured:") and "1.020 against 1.180" in imbalance
    assert work.startswith("Predicted: the work is 91.0% of that at base budgets")
    assert "0.690 against 0.710" in work and "not balance alone" in work


def test_work_that_was_not_cut() -> None:
    (_, work) = comparison_findings(
        comparison(summary(work_ratio=1.0), summary(), speedup=1.1, speedup_total=1.1)
    )
    assert "not balance alone" not in work


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ({}, "Speedup: not measured"),
        ({"speedup": 1.5}, "1.50 times as fast as the baseline by median iterations. Total times"),
    ],
)
def test_no_more_is_claimed_than_is_known(speedups: dict[str, float], words: str) -> None:
    (only,) = comparison_findings(comparison(summary(), summary(), **speedups))
    assert words in only


def test_a_run_alone() -> None:
    assert run_findings(summary()) == []
    prediction, bound = run_findings(
        summary(predicted_error=0.038, predicted_ms=100.0, measured_ms=104.0, lower_bound_ms=90.0)
    )
    assert "104.0 ms as measured and 100.0 ms as predicted" in prediction
    assert "3.8% off" in prediction
    assert bound.startswith("Predicted: no placement") and "90.0 ms" in bound


def test_what_ran() -> None:
    header = {
        "data_parallel_size": 1,
        "pipeline_stages": 2,
        "virtual_stages": 1,
        "micro_batches": 4,
        "config": {"block_size": 256, "batching": "makespan"},
        "torch": "2.15.0",
    }
    assert subtitle(header) == (
        "1 data-parallel rank, 2 pipeline stages, 4 micro-batches, block size 256, "
        "batching makespan, torch 2.15.0"
    )
    assert "no header" in subtitle({})
    assert "no header" in subtitle({"config": "x"})
