# SPDX-License-Identifier: Apache-2.0
"""Two training runs alternate, and the clock of each stands still while the other trains."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness import REPOSITORY, TrainingRun, train, write_documents

from sparsebalance_megatron.log.reader import read_rank_logs

PROGRAM = REPOSITORY / "benchmarks" / "alternating_run.py"
STEPS = 4


@pytest.mark.nightly
def test_two_training_runs_alternate(tmp_path: Path) -> None:
    """Their steps, by the wall clock, lie one behind the other."""
    documents = write_documents(tmp_path / "train", [40, 90, 130, 60, 200, 30, 75, 110] * 4)
    runs: dict[str, TrainingRun] = {}

    def begin(place: str) -> None:
        program = (str(PROGRAM), str(tmp_path / "meet"), place)
        log_dir = tmp_path / place
        runs[place] = train(1, documents, log_dir=log_dir, program=program, torchrun=True)

    threads = [threading.Thread(target=begin, args=(place,)) for place in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs.values():
        run.require_success()
    assert "training on cpu" in runs["first"].output
    assert runs["first"].losses == runs["second"].losses
    starts_s = {place: _starts_s(tmp_path / place) for place in runs}
    order = [starts_s[place][step] for step in range(STEPS) for place in ("first", "second")]
    assert order == sorted(order)
    passed_ms = (starts_s["first"][-1] - starts_s["first"][0]) * 1e3
    counted_ms = [step["iteration_ms"] for step in runs["first"].steps[1:]]
    waited_ms = [step["iteration_ms"] for step in runs["second"].steps[1:]]
    assert sum(counted_ms) + sum(waited_ms) < 1.2 * passed_ms


def _starts_s(log_dir: Path) -> list[float]:
    steps = read_rank_logs(log_dir, range(1, STEPS + 1)).steps
    return [steps[iteration][0, 0].start_unix_s for iteration in range(1, STEPS + 1)]
