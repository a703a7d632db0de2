# SPDX-License-Identifier: Apache-2.0
"""Tables of a report: micro-batches of a step, the worst steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from record_cases import rank_micro_batch, rank_step, step_record
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.log.reader import read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import RankStep
from sparsebalance_megatron.view.report.tables import micro_batch_table, worst_steps, worst_table

STEP = step_record(
    1,
    measured={
        "forward_ms": [[[[1.0, 1.0]], [[1.0, 1.0]]]],
        "backward_ms": [[[[2.0, 2.0]], [[2.0, None]]]],
        "rank_busy_ms": [6.0],
    },
    predicted={
        "forward_ms": [[[[1000.0, 1000.0]]] * 2],
        "backward_ms": [[[[1000.0, 1000.0]]] * 2],
        "rank_busy_ms": [4000.0],
    },
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
    first, second = micro_batch_table(STEP, ranks, {0}).rows
    assert first == ("0", "0", "4,096 · 100", "4.0 · 1.0", "0.833", "4,000.0", "6.0")
    assert second == ("0", "1", "", "", "", "4,000.0", "")
    assert micro_batch_table(STEP, {}, {1}).rows == []


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
