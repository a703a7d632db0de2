# SPDX-License-Identifier: Apache-2.0
"""Sentences: which numbers they give, how these are known, and that no others are claimed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparsebalance_megatron.report.comparison import Comparison, RunSummary
from sparsebalance_megatron.report.sentences import comparison_findings, run_findings, subtitle


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = dict.fromkeys(RunSummary.__dataclass_fields__)
    values |= {"steps": 9, "warm_up_steps": 1, "iteration_ms": ()}
    return RunSummary(**(values | changes))


def facts(sentences: list[str]) -> list[tuple[str, list[float]]]:
    """(first word, decimal numbers in order) of every sentence."""
    return [
        (
            re.split(r"\W", sentence)[0],
            [float(number) for number in re.findall(r"\d+\.\d+", sentence)],
        )
        for sentence in sentences
    ]


def compared(run: RunSummary, baseline: RunSummary, **speedups: float) -> list[str]:
    values: dict[str, Any] = dict.fromkeys(("speedup", "speedup_paired", "speedup_total"))
    return comparison_findings(
        Comparison(baseline=baseline, sparse_balance=run, problems=(), **(values | speedups))
    )


def test_a_speedup_with_what_it_cost() -> None:
    run = summary(rank_imbalance=1.02, work_ratio=0.91, coverage_mean=0.69)
    baseline = summary(rank_imbalance=1.18, coverage_mean=0.71)
    found = compared(run, baseline, speedup=1.35, speedup_paired=1.17, speedup_total=1.25)
    assert facts(found) == [
        ("Measured", [1.25, 1.35, 1.17]),
        ("Measured", [1.02, 1.18]),
        ("Predicted", [91.0, 0.69, 0.71]),
    ]
    *_, uncut = compared(summary(work_ratio=1.0), baseline, speedup=1.1, speedup_total=1.1)
    assert [("not balance alone" in sentence) for sentence in (found[-1], uncut)] == [True, False]


@pytest.mark.parametrize(
    ("speedups", "claimed"), [({}, ("Speedup", [])), ({"speedup": 1.5}, ("Measured", [1.5]))]
)
def test_no_more_is_claimed_than_is_known(
    speedups: dict[str, float], claimed: tuple[str, list[float]]
) -> None:
    assert facts(compared(summary(), summary(), **speedups)) == [claimed]


def test_a_run_alone() -> None:
    assert run_findings(summary()) == []
    known = {"predicted_error": 0.038, "predicted_ms": 100.0, "measured_ms": 104.0}
    assert facts(run_findings(summary(**known, lower_bound_ms=90.0))) == [
        ("Predicted", [104.0, 100.0, 3.8]),
        ("Predicted", [90.0]),
    ]


def test_what_ran() -> None:
    sizes = {"data_parallel_size": 1, "pipeline_stages": 2, "virtual_stages": 1, "micro_batches": 4}
    config = {"block_size": 256, "batching": "makespan"}
    shape = "1 data-parallel rank, 2 pipeline stages, 4 micro-batches"
    assert subtitle(sizes) == shape
    assert subtitle(sizes | {"config": config, "torch": "2.15.0"}) == (
        f"{shape}, block size 256, batching makespan, torch 2.15.0"
    )
    assert subtitle({}) == subtitle({"config": "x"}) != ""
