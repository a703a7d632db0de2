# SPDX-License-Identifier: Apache-2.0
"""Sentences: which numbers they give, how these are known, and that no others are claimed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparsebalance_megatron.report.comparison import Comparison, RunSummary
from sparsebalance_megatron.report.explanation import Explanation, TimeSplit
from sparsebalance_megatron.report.sentences import (
    comparison_findings,
    headline,
    run_findings,
    subtitle,
)


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


def compared(run: RunSummary, baseline: RunSummary, **changes: Any) -> Comparison:
    values: dict[str, Any] = dict.fromkeys(("speedup", "speedup_paired", "speedup_total"))
    return Comparison(baseline=baseline, sparse_balance=run, problems=(), **(values | changes))


def explained(**changes: Any) -> Explanation:
    values: dict[str, Any] = {
        "baseline": TimeSplit(steps=9, compute_ms=5000.0, waiting_ms=900.0, rest_ms=100.0),
        "run": TimeSplit(steps=9, compute_ms=4700.0, waiting_ms=200.0, rest_ms=100.0),
        "less_attention_ms": -300.0,
        "waiting_ms": -700.0,
        "rest_ms": 0.0,
        "machine_ms": 0.0,
        "machine_spread": 0.01,
        "speedup_interval": (1.15, 1.25),
    }
    return Explanation(**(values | changes))


def test_the_headline_has_an_interval() -> None:
    comparison = compared(
        summary(), summary(), speedup=1.3, speedup_total=1.2, explanation=explained()
    )
    assert headline(comparison) == (
        "Measured: 1.20 times as fast as the baseline (95 % interval 1.15 to 1.25): a mean step "
        "takes 5,000 ms instead of 6,000 ms."
    )


def test_what_a_speedup_consists_of_and_cost() -> None:
    run = summary(rank_imbalance=1.02, work_ratio=0.91, coverage_mean=0.69)
    baseline = summary(rank_imbalance=1.18, coverage_mean=0.71)
    found = comparison_findings(compared(run, baseline, explanation=explained()))
    assert (
        "6,000 ms, less attention -300 ms, less waiting -700 ms, rest of the step 0 ms" in found[0]
    )
    assert facts(found[1:]) == [("Measured", [1.02, 1.18]), ("Predicted", [91.0, 0.69, 0.71])]
    (uncut,) = comparison_findings(compared(summary(work_ratio=1.0), summary()))
    assert [("not balance alone" in sentence) for sentence in (found[-1], uncut)] == [True, False]


def test_an_uneven_machine_is_named_with_what_it_did() -> None:
    slower = explained(
        run=TimeSplit(steps=9, compute_ms=5700.0, waiting_ms=200.0, rest_ms=100.0),
        machine_ms=1000.0,
    )
    found = comparison_findings(compared(summary(), summary(), explanation=slower))
    assert "equal work took 20% longer in this run" in found[1]
    assert "this run would be 1.20 times as fast" in found[1]
    unsteady = explained(machine_spread=0.2)
    assert (
        "varied by 20%"
        in comparison_findings(compared(summary(), summary(), explanation=unsteady))[1]
    )


@pytest.mark.parametrize(
    ("speedups", "claimed"), [({}, ("Speedup", [])), ({"speedup": 1.5}, ("Measured", [1.5]))]
)
def test_no_more_is_claimed_than_is_known(
    speedups: dict[str, float], claimed: tuple[str, list[float]]
) -> None:
    comparison = compared(summary(), summary(), **speedups)
    assert facts([headline(comparison)]) == [claimed]
    assert comparison_findings(comparison) == []


def test_a_run_alone() -> None:
    assert run_findings(summary()) == []
    assert headline(summary()) == "No step of this run was measured whole."
    split = TimeSplit(steps=9, compute_ms=800.0, waiting_ms=150.0, rest_ms=50.0)
    assert headline(summary(split=split)) == (
        "Measured: a mean step takes 1,000 ms; stages compute 80% of it, wait 15%, and 5% is the "
        "rest of the step."
    )
    known = {"predicted_error": 0.038, "predicted_ms": 90.5, "measured_ms": 94.5}
    assert facts(run_findings(summary(**known, lower_bound_ms=90.0))) == [
        ("Predicted", [94.5, 90.5, 3.8]),
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
