# SPDX-License-Identifier: Apache-2.0
"""The headline and the lines below it: which numbers they give, and that no others are claimed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.log.reader import read_rank_logs, read_run_log
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.view.report.numbers import (
    Comparison,
    Explanation,
    RunSummary,
    TimeSplit,
)
from sparsebalance_megatron.view.report.words import (
    caveats,
    changes,
    headline,
    worst_steps,
    worst_table,
)


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = dict.fromkeys(RunSummary.__dataclass_fields__)
    values |= {"steps": 9, "warm_up_steps": 1, "iteration_ms": ()}
    return RunSummary(**(values | changes))


def numbers(*sentences: str) -> list[float]:
    """All numbers, in order."""
    found = re.findall(r"[+-]?\d[\d,.]*\d|\d", " ".join(sentences))
    return [float(number.replace(",", "")) for number in found]


def compared(**changes: Any) -> Comparison:
    values: dict[str, Any] = dict.fromkeys(("speedup", "speedup_of_medians"))
    values |= {"baseline": summary(), "sparse_balance": summary(), "problems": ()}
    return Comparison(**(values | changes))


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


def test_a_speedup_has_an_interval_and_its_parts() -> None:
    comparison = compared(speedup_of_medians=1.3, speedup=1.2, explanation=explained())
    assert numbers(headline(comparison)) == [1.2, 95, 1.15, 1.25, 5000, 6000]
    assert numbers(*changes(comparison)) == [6000, -300, -700, 0, 0]


@pytest.mark.parametrize(("speedups", "claimed"), [({}, []), ({"speedup_of_medians": 1.5}, [1.5])])
def test_no_more_is_claimed_than_is_known(speedups: dict[str, float], claimed: list[float]) -> None:
    comparison = compared(**speedups)
    assert numbers(headline(comparison)) == claimed
    assert changes(comparison) == []


def test_what_times_include_is_said_of_the_run_that_they_are_of() -> None:
    alone, lockstep = summary(lockstep_ranks=1), summary(lockstep_ranks=4)
    notice = lockstep_notice(4)
    assert caveats(alone) == []
    assert caveats(lockstep) == [notice]
    assert caveats(compared(baseline=lockstep, sparse_balance=lockstep)) == [notice]
    both = compared(baseline=alone, sparse_balance=lockstep)
    assert caveats(both) == [f"Sparse balance: {notice}"]


SLOWED = 7


def slowed(directory: Path) -> Path:
    """A run of which one forward took ten times as long: of rank 1, stage 0, micro-batch 2."""
    SampleRun(steps=10, noise=0.0).write(directory)
    path = directory / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record.get("iteration") == SLOWED and record["type"] == "step":
            forwards = record["measured"]["times_2RPVM"][0][1][0][0]
            record["figures"]["busiest_rank_ms_measured"] += 9.0 * forwards[2]
            forwards[2] *= 10.0
    write_lines(path, records)
    return directory


def test_the_slowed_micro_batch_is_named(tmp_path: Path) -> None:
    log = read_run_log(slowed(tmp_path / "run"))
    worst = worst_steps(log.steps)
    assert worst[0].iteration == SLOWED and len(worst) <= 5
    ranks = read_rank_logs(log.directory, {step.iteration for step in worst})
    rows = worst_table(worst, ranks).rows
    lost_ms = [float(row[1].replace(",", "")) for row in rows]
    assert lost_ms == sorted(lost_ms, reverse=True)
    iteration, _, place, host, micro_batch, tokens, *_, ratio = rows[0]
    assert (iteration, place, micro_batch) == (str(SLOWED), "1, 0", "2")
    held = ranks.steps[SLOWED][(1, 0)].micro_batches[2]
    assert (host, tokens) == ("node0", f"{held.tokens:,}")
    assert float(ratio) > 2.0
