# SPDX-License-Identifier: Apache-2.0
"""A report and a trace of what Megatron's own loop really left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    long_tailed_lengths,
    run_training,
    write_documents,
)

from sparsebalance_megatron import cli
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.log.records import SIDES
from sparsebalance_megatron.view.report.run_data import gather
from sparsebalance_megatron.view.report.run_report import make_report
from sparsebalance_megatron.view.report.timeline import (
    MEASURED,
    SIMULATED,
    Timeline,
    simulated_timeline,
)

pytestmark = pytest.mark.distributed

STAGES, ITERATIONS, MICRO_BATCHES = 2, 4, 8


@pytest.fixture(scope="module")
def log_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages on one data-parallel rank."""
    directory = tmp_path_factory.mktemp("real")
    documents = write_documents(directory / "train", long_tailed_lengths(60, longest=250))
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, "--data-path", str(documents))
    parallel = ("--pipeline-model-parallel-size", str(STAGES))
    log = directory / "log"
    run_training(STAGES, (*flags, *parallel), log_dir=log).require_success()
    return log


def test_everything_is_drawn(log_directory: Path) -> None:
    report = make_report(log_directory, None, None)
    assert report.notes == report.not_drawn == []
    assert report.step and report.ranks and report.coverage
    assert len(report.micro_batches.rows) == MICRO_BATCHES
    assert all(cell for row in report.micro_batches.rows for cell in row)
    assert any(MEASURED in remark for remark in report.step.remarks)


def test_the_trace_holds_every_forward_and_backward(log_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["trace", str(log_directory), "-o", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    for side in SIDES:
        for iteration in range(2, ITERATIONS + 1):
            slices = [
                event["name"]
                for event in events
                if event.get("cat") == side and event["args"]["iteration"] == iteration
            ]
            assert len(slices) == 2 * MICRO_BATCHES * STAGES
            assert len(set(slices)) == 2 * MICRO_BATCHES


def test_the_schedule_that_ran_is_the_one_that_is_simulated(log_directory: Path) -> None:
    evidence = gather(read_run_log(log_directory), (ITERATIONS,))
    measured = evidence.timeline("measured", ITERATIONS)
    simulated = simulated_timeline(evidence.log.steps[-1], "measured")
    assert measured is not None and simulated is not None
    assert (measured.source, simulated.source) == (MEASURED, SIMULATED)
    for stage in range(STAGES):
        assert operations(measured, stage) == operations(simulated, stage)


def operations(timeline: Timeline, stage: int) -> list[tuple[str, int]]:
    spans = sorted(timeline.spans[0, stage], key=lambda span: span.start_ms)
    return [(span.direction, span.position) for span in spans]
