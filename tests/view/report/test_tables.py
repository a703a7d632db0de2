# SPDX-License-Identifier: Apache-2.0
"""Tables of a report: micro-batches of a step, the worst steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from record_cases import rank_micro_batch, rank_step
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.log.records import RankStep
from sparsebalance_megatron.log.steps import MicroBatchTimes
from sparsebalance_megatron.view.report.run_data import gather, open_log
from sparsebalance_megatron.view.report.tables import (
    MicroBatchRow,
    micro_batch_rows,
    worst_iterations,
    worst_rows,
)

TIMES = MicroBatchTimes(
    measured_2RPVM=np.array(
        [[[[[1.0, 1.0]], [[1.0, 1.0]]]], [[[[2.0, 2.0]], [[2.0, np.nan]]]]],
    ),
    predicted_2RPVM=np.full((2, 1, 2, 1, 2), 1000.0),
    cp_sizes_RM=np.ones((1, 2), dtype=np.int64),
)
SLOWED = 7


def stage(budgets_LS: list[list[float]], coverage: float | None) -> RankStep:
    return rank_step(
        rank_micro_batch(
            lengths_tokens=(4096, 100), budgets=np.array(budgets_LS), coverage=(coverage, 1.0)
        )
    )


def test_stages_of_a_micro_batch_are_put_together() -> None:
    ranks = {(0, 0): stage([[2.0, 1.0], [4.0, 1.0]], 0.5), (0, 1): stage([[6.0, 1.0]], None)}
    first, second = micro_batch_rows(TIMES, ranks, {0})
    assert first == MicroBatchRow(
        rank="0",
        position="0",
        lengths="4,096 · 100",
        budgets="4.0 · 1.0",
        coverage="0.833",
        predicted_ms="4,000.0",
        measured_ms="6.0",
    )
    assert second == MicroBatchRow("0", "1", "", "", "", "4,000.0", "")


def test_ranks_that_are_not_drawn_or_not_timed() -> None:
    assert micro_batch_rows(TIMES, {}, {1}) == []
    assert micro_batch_rows(None, {}, {0}) == []
    (row,) = micro_batch_rows(None, {(3, 0): stage([[2.0, 1.0]], 0.5)}, {3})
    assert (row.rank, row.measured_ms) == ("3", "")


def slowed(directory: Path) -> Path:
    """A run of which one forward took ten times as long: of rank 1, stage 0, micro-batch 2."""
    SampleRun(steps=10, noise=0.0).write(directory)
    path = directory / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record.get("iteration") == SLOWED and record["type"] == "step":
            measured = record["measured"]
            extra_ms = 9.0 * measured["forward_ms"][1][0][0][2]
            measured["forward_ms"][1][0][0][2] += extra_ms
            measured["rank_busy_ms"][1] += extra_ms
    write_lines(path, records)
    return directory


def test_the_slowed_micro_batch_is_named(tmp_path: Path) -> None:
    log = open_log(slowed(tmp_path / "run"))
    iterations = worst_iterations(log.steps)
    assert iterations[0] == SLOWED and len(iterations) <= 5
    evidence = gather(log, set(iterations))
    rows = worst_rows(iterations, evidence.times, evidence.ranks)
    lost_ms = [float(row.lost_ms.replace(",", "")) for row in rows]
    assert lost_ms == sorted(lost_ms, reverse=True)
    first = rows[0]
    assert (first.iteration, first.rank, first.micro_batch) == (str(SLOWED), "1, 0", "2")
    held = evidence.ranks.steps[SLOWED][(1, 0)].micro_batches[2]
    assert (first.host, first.tokens) == ("node0", f"{held.tokens:,}")
    assert float(first.ratio) > 2.0
