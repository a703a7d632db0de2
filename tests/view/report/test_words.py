# SPDX-License-Identifier: Apache-2.0
"""The headline and the lines below it: which numbers they give, and that no others are claimed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from record_cases import header_of, step_record
from step_cases import JOB
from view.report.sample_run import SampleRun

from sparsebalance_megatron.log.reader import read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import CoverageRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.view.report.numbers import (
    Change,
    Comparison,
    Explanation,
    RunSummary,
    TimeSplit,
)
from sparsebalance_megatron.view.report.words import (
    caveats,
    changes,
    coverage_table,
    headline,
    layers_table,
    slowest_device,
    slowest_text,
)


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = dict.fromkeys(RunSummary.__dataclass_fields__)
    values |= {"steps": 9, "warm_up_steps": 1}
    return RunSummary(**(values | changes))


def numbers(*sentences: str) -> list[float]:
    """All numbers, in order."""
    found = re.findall(r"[+-]?\d[\d,.]*\d|\d", " ".join(sentences))
    return [float(number.replace(",", "")) for number in found]


def compared(**changes: Any) -> Comparison:
    values: dict[str, Any] = {"speedup": None}
    values |= {"baseline": summary(), "sparse_balance": summary(), "problems": ()}
    return Comparison(**(values | changes))


EXPLAINED = Explanation(
    baseline=TimeSplit(compute_ms=5000.0, waiting_ms=900.0, rest_ms=100.0),
    run=TimeSplit(compute_ms=4700.0, waiting_ms=200.0, rest_ms=100.0),
    changes=(Change("less attention", -300.0), Change("less waiting", -700.0)),
    speedup_interval=(1.15, 1.25),
)


def test_a_speedup_has_an_interval_and_its_parts() -> None:
    comparison = compared(speedup=1.2, explanation=EXPLAINED)
    assert numbers(headline(comparison)) == [1.2, 95, 1.15, 1.25, 5000, 6000]
    assert numbers(*changes(comparison)) == [6000, -300, -700]


def test_no_more_is_claimed_than_is_known() -> None:
    assert numbers(headline(compared())) == []
    assert changes(compared()) == []


def test_what_times_include_is_said_of_the_run_that_they_are_of() -> None:
    alone, lockstep = summary(lockstep_ranks=1), summary(lockstep_ranks=4)
    notice = lockstep_notice(4)
    assert caveats(alone) == []
    assert caveats(lockstep) == [notice]
    assert caveats(compared(baseline=lockstep, sparse_balance=lockstep)) == [notice]
    both = compared(baseline=alone, sparse_balance=lockstep)
    assert caveats(both) == [f"Sparse balance: {notice}"]


def test_the_slowest_device_is_named_with_its_host(tmp_path: Path) -> None:
    """Stage 0 of rank 1 takes half as long again; another layout before it does not count."""
    steps = read_run_log(SampleRun(steps=4, noise=0.0).write(tmp_path)).steps
    assert slowest_device(steps) is None, "all are alike"
    for step in steps:
        step.measured.times_2RPVM[:, 1, 0] *= 1.5
    found = slowest_device((step_record(1), *steps))
    assert found == ((1, 0), pytest.approx(1.5, rel=0.01))
    ranks = read_rank_logs(tmp_path)
    assert slowest_text(*found, ranks).startswith("slowest: rank 1 stage 0 on node0, 1.50 times")
    assert slowest_device((*steps, step_record(1))) is None


def test_coverage_is_that_of_the_layers_mean_and_least() -> None:
    curves_LUK = np.full((2, 3, 4), np.nan)
    curves_LUK[:, 0] = 1.0
    curves_LUK[:, 2] = (0.2, 0.4, 0.6, 0.8), (0.4, 0.6, 0.8, 1.0)
    record = CoverageRecord(
        iteration=5, grid=(1, 2, 3, 4), bucket_blocks=(1, 3, 7), curves_LUK=curves_LUK
    )
    cells = {"1": "0.300 (0.200)", "2": "0.500 (0.400)", "4": "0.900 (0.800)"}
    assert coverage_table(record) == [{"blocks": "4 to 7", **cells}]
    assert not coverage_table(None)


def test_base_budgets_of_layers() -> None:
    header = header_of(replace(JOB, stage_layers=(((0, 1, 2, 3),),)))

    def rows(text: str | None) -> list[tuple[str, ...]]:
        config = {"base_budget": 8, "layer_budgets": text}
        return [tuple(row.values()) for row in layers_table(structs.replace(header, config=config))]

    assert rows("dense:0 2:1-2") == [("all: dense", "0"), ("8", "3"), ("2", "1, 2")]
    assert not rows(None) and not rows("dense:all") and not layers_table(None)
