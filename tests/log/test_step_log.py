# SPDX-License-Identifier: Apache-2.0
"""Step logs: whole, damaged, resumed, missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_cases import HEADER, MEASURED, PREDICTED, header_of
from record_cases import step_line as record
from step_cases import JOB, measured_as_planned, planned_step

from sparsebalance_megatron.log.log_file import JsonLinesFile
from sparsebalance_megatron.log.recording import (
    FinishedStep,
    coverage_record,
    step_record,
)
from sparsebalance_megatron.log.records import encode
from sparsebalance_megatron.log.step_log import (
    RunLogError,
    logged_schedule,
    read_run_log,
    read_step_times,
    step_log_path,
)
from sparsebalance_megatron.plan.pipeline.orders import (
    MegatronSchedule,
    megatron_order,
)

ONES = np.ones((1, 2, 2))


def write(directory: Path, *lines: Any) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / "steps.jsonl").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return directory


def test_what_is_written_is_read(tmp_path: Path) -> None:
    planned = planned_step()
    header = header_of(JOB)
    log = JsonLinesFile(step_log_path(tmp_path))
    log.begin(header, resumed=False)
    for iteration in (1, 2):
        step = FinishedStep(
            iteration=iteration,
            iteration_ms=None if iteration == 1 else 10.0,
            planned=planned,
            measured=measured_as_planned(planned),
            padded_tokens=0,
            host_ms={"plan": 1.0},
        )
        log.append(step_record(step))
    log.append(
        coverage_record(iteration=2, grid=(1, 2), mean_LUK=ONES, observed_LU=ONES[..., 0] > 0)
    )
    log.close()
    read = read_run_log(tmp_path)
    assert read.problems == ()
    assert json.loads(json.dumps(read.header)) == HEADER
    sizes = ("data_parallel_size", "pipeline_stages", "virtual_stages", "micro_batches", "layers")
    assert [HEADER[size] for size in sizes] == [2, 2, 2, 2, 8]
    assert HEADER["schedule"] == "interleaved"
    assert [(step.iteration, step.iteration_ms) for step in read.steps] == [(1, None), (2, 10.0)]
    assert read.coverage is not None and read.coverage.iteration == 2
    assert list(read_step_times(tmp_path, {2, 3})) == [2]


def test_whole_log(tmp_path: Path) -> None:
    log = read_run_log(write(tmp_path, HEADER, record(1), record(2)))
    assert json.loads(json.dumps(log.header)) == HEADER
    assert log.problems == ()
    assert [step.iteration for step in log.steps] == [1, 2]
    first, second = log.steps
    assert (first.iteration_ms, second.iteration_ms) == (None, 100.0)
    assert second.lm_loss == 7.0
    assert second.measured_rank_ms == (90.0, 70.0)
    assert second.predicted_rank_ms == (80.0, 60.0)
    assert (second.lower_bound_ms, second.work_ratio, second.coverage) == (70.0, 1.0, 0.75)


def test_last_line_cut_off(tmp_path: Path) -> None:
    cut = json.dumps(record(3))[:40]
    log = read_run_log(write(tmp_path, HEADER, record(1), record(2), cut))
    assert [step.iteration for step in log.steps] == [1, 2]
    (problem,) = log.problems
    assert "steps.jsonl line 4" in problem
    assert "cut off" in problem


BAD_LINES: dict[str, tuple[Any, str]] = {
    "array": ([1, 2], "got array"),
    "number": ("7", "got int"),
    "unknown-type": ({"type": "stp"}, "type 'stp'"),
    "no-coverage": (record(2, coverage={}), "coverage: "),
    "no-measured": (record(2, measured=None), "measured None"),
    "iteration-null": (record(2, iteration=None), "iteration None"),
    "loss-text": (record(2, lm_loss="3.1"), "lm_loss '3.1'"),
    "loss-nan": (record(2, lm_loss=float("nan")), "not JSON"),
    "time-true": (record(2, iteration_ms=True), "iteration_ms True"),
    "rank-text": (
        record(2, measured=MEASURED | {"rank_busy_ms": [1.0, "x"]}),
        "measured.rank_busy_ms[1] 'x'",
    ),
    "rank-number": (
        record(2, measured=MEASURED | {"rank_busy_ms": 5.0}),
        "measured.rank_busy_ms 5.0",
    ),
    "times-text": (record(2, measured=MEASURED | {"forward_ms": "x"}), "measured.forward_ms 'x'"),
    "times-flat": (record(2, measured=MEASURED | {"forward_ms": [1.0]}), "forward_ms"),
    "times-shape": (record(2, measured=MEASURED | {"backward_ms": [[[[1.0]]]]}), "backward_ms"),
    "predicted-shape": (record(2, predicted=PREDICTED | {"forward_ms": [[[[1.0]]]]}), "forward_ms"),
    "rank-count": (record(2, measured=MEASURED | {"rank_busy_ms": [5.0]}), "rank_busy_ms of 1"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_damaged_line_is_named_and_the_rest_kept(tmp_path: Path, case: str) -> None:
    line, message = BAD_LINES[case]
    log = read_run_log(write(tmp_path, HEADER, record(1), line, record(3)))
    assert [step.iteration for step in log.steps] == [1, 3]
    (problem,) = log.problems
    assert "line 3" in problem
    assert message in problem


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    write(tmp_path, HEADER, record(1))
    with (tmp_path / "steps.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe\x00\n")
    log = read_run_log(tmp_path)
    assert len(log.steps) == 1
    assert "line 3" in log.problems[0]


def test_a_step_is_complete_with_every_micro_batch_measured(tmp_path: Path) -> None:
    unmeasured = MEASURED | {"forward_ms": [[[[None, 1.0]]], [[[1.0, 1.0]]]]}
    log = read_run_log(write(tmp_path, HEADER, record(1), record(2, measured=unmeasured)))
    assert [step.complete for step in log.steps] == [True, False]


def test_null_is_unmeasured(tmp_path: Path) -> None:
    step = record(1, lm_loss=None, measured=MEASURED | {"rank_busy_ms": [1.0, None]})
    (read,) = read_run_log(write(tmp_path, HEADER, step)).steps
    assert read.lm_loss is None
    assert read.measured_rank_ms is None


def test_resume_replaces_steps_and_says_so(tmp_path: Path) -> None:
    again = record(2, lm_loss=1.25)
    log = read_run_log(
        write(tmp_path, HEADER, record(1), record(2), record(3), HEADER, again, record(3))
    )
    assert [step.iteration for step in log.steps] == [1, 2, 3]
    assert log.steps[1].lm_loss == 1.25
    (problem,) = log.problems
    assert "2 steps ran again" in problem


def test_header_missing(tmp_path: Path) -> None:
    log = read_run_log(write(tmp_path, record(1)))
    assert len(log.steps) == 1
    assert "no header" in log.problems[0]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"steps\.jsonl: not there; .*--sparse-balance-log-dir"):
        read_run_log(tmp_path / "absent")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "ended before its first step"),
        ((HEADER,), "ended before its first step"),
        ((HEADER, "{"), "no readable step: .* line 2"),
    ],
)
def test_no_step(tmp_path: Path, lines: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RunLogError, match=message):
        read_run_log(write(tmp_path, *lines))


def test_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(RunLogError, match="directory"):
        read_run_log(tmp_path)


COVERAGE = {
    "type": "coverage",
    "iteration": 2,
    "grid": [1, 2],
    "bucket_blocks": [1, 2],
    "curves": [[None, [0.5, 1.0]], [[None, None], [0.25, 1.0]]],
}


def test_the_last_coverage_curves_count(tmp_path: Path) -> None:
    earlier = COVERAGE | {"iteration": 1, "curves": [[None, None]]}
    log = read_run_log(write(tmp_path, HEADER, record(1), earlier, record(2), COVERAGE))
    assert log.problems == ()
    assert log.coverage is not None
    assert (log.coverage.iteration, log.coverage.grid) == (2, (1, 2))
    assert log.coverage.bucket_blocks == (1, 2)
    missing, known = [np.nan, np.nan], [[0.5, 1.0], [0.25, 1.0]]
    expected_LUK = np.stack([np.array([missing, missing]), np.array(known)], axis=1)
    np.testing.assert_array_equal(log.coverage.curves_LUK, expected_LUK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curves": [[[0.5, 1.0]]]}, "curves must have 2 buckets and 2 budgets"),
        ({"curves": [[[0.5], [1.0]]]}, "curves must have 2 buckets and 2 budgets"),
        ({"curves": [[1.0, 2.0]]}, r"curves\[0\]\[0\] 1.0"),
        ({"curves": "x"}, "curves 'x'"),
        ({"curves": []}, "curves"),
        ({"grid": [1, None]}, r"grid\[1\] None"),
        ({"iteration": None}, "iteration None"),
    ],
)
def test_damaged_coverage_is_left_out(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    log = read_run_log(write(tmp_path, HEADER, record(1), COVERAGE, COVERAGE | change))
    assert log.coverage is not None
    (problem,) = log.problems
    assert re.search(rf"line 4: .*{message}", problem)


def test_the_older_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path, HEADER, record(1, lm_loss=1.0), record(2, lm_loss=1.0))
    (tmp_path / "steps.jsonl").rename(tmp_path / "steps.1.jsonl")
    newer = HEADER | {"config": {"batching": "length"}, "lines_discarded": 7}
    late = record(3) | {"lines_dropped": 2}
    log = read_run_log(write(tmp_path, newer, record(2, lm_loss=5.0), late))
    assert [step.iteration for step in log.steps] == [1, 2, 3]
    assert [step.lm_loss for step in log.steps] == [1.0, 5.0, 6.0]
    assert log.header["config"] == {"batching": "length"}
    discarded, dropped, repeated = log.problems
    assert "the 7 oldest lines were discarded" in discarded
    assert "2 lines could not be written" in dropped
    assert "1 steps ran again" in repeated


def test_the_older_file_alone_is_enough(tmp_path: Path) -> None:
    write(tmp_path, HEADER, record(1))
    (tmp_path / "steps.jsonl").rename(tmp_path / "steps.1.jsonl")
    assert len(read_run_log(tmp_path).steps) == 1


@pytest.mark.parametrize("group_size", [None, 4])
def test_a_reader_simulates_the_schedule_of_the_run(group_size: int | None) -> None:
    job = replace(JOB, micro_batch_group_size=group_size)
    header = json.loads(encode(header_of(job)))
    assert logged_schedule(header) == job.schedule == MegatronSchedule(group_size)
    assert logged_schedule({}) == megatron_order
