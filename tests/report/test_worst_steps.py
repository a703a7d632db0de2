# SPDX-License-Identifier: Apache-2.0
"""The worst steps are those that were slowed down, and the micro-batch that was is named."""

from __future__ import annotations

import json
from pathlib import Path

from report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.report.run_data import gather, open_log
from sparsebalance_megatron.report.worst_steps import worst_iterations, worst_rows

SLOWED = 7


def _slowed(directory: Path) -> Path:
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
    log = open_log(_slowed(tmp_path / "run"))
    iterations = worst_iterations(log.steps)
    assert iterations[0] == SLOWED and len(iterations) <= 5
    evidence = gather(log, set(iterations))
    first = worst_rows(iterations, dict(evidence.times), evidence.ranks)[0]
    assert (first.iteration, first.rank, first.micro_batch) == (str(SLOWED), "1, 0", "2")
    held = evidence.ranks.steps[SLOWED][(1, 0)].micro_batches[2]
    assert (first.host, first.tokens) == ("node0", f"{held.tokens:,}")
    assert float(first.ratio) > 2.0


def test_nothing_is_named_without_predictions(tmp_path: Path) -> None:
    SampleRun(steps=4, with_predicted_times=False).write(tmp_path / "run")
    log = open_log(tmp_path / "run")
    evidence = gather(log, {4})
    assert worst_rows((4,), dict(evidence.times), evidence.ranks) == []
    assert worst_iterations(()) == ()
