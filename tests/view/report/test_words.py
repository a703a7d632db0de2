# SPDX-License-Identifier: Apache-2.0
"""The headline and the lines below it: which numbers they give, and that no others are claimed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from msgspec import structs
from record_cases import header_of
from step_cases import JOB
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
    descriptions,
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
    values: dict[str, Any] = {"speedup": None}
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
        "speedup_interval": (1.15, 1.25),
    }
    return Explanation(**(values | changes))


def test_a_speedup_has_an_interval_and_its_parts() -> None:
    comparison = compared(speedup=1.2, explanation=explained())
    assert numbers(headline(comparison)) == [1.2, 95, 1.15, 1.25, 5000, 6000]
    assert numbers(*changes(comparison)) == [6000, -300, -700, 0, 0]


def test_no_more_is_claimed_than_is_known() -> None:
    assert numbers(headline(compared())) == []
    assert changes(compared()) == []


def test_runs_are_described_by_what_they_read_and_how_samples_are_placed() -> None:
    sparse = {"block_size": 256, "base_budget": 32, "batching": "arrival", "tuning": "off"}
    dense = sparse | {"layer_budgets": "dense:all", "batching": "makespan"}
    headers = {
        name: structs.replace(header_of(JOB), config=config)
        for name, config in (("Baseline", sparse), ("This run", dense))
    }
    baseline, run = descriptions(headers | {"unknown": None})
    assert (
        baseline.startswith("Baseline: block-sparse attention") and "32 blocks of 256" in baseline
    )
    assert baseline.endswith("in order of arrival.")
    assert run.startswith("This run: dense attention") and "shortest step" in run


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
