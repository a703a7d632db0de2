# SPDX-License-Identifier: Apache-2.0
"""Logs of single ranks: what is read, which are passed over, what is said of damage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.rank_log import (
    rank_files,
    rank_iterations,
    rank_log_path,
    read_rank_logs,
)

HEADER = {
    "type": "rank",
    "world_rank": 0,
    "data_parallel_rank": 0,
    "pipeline_rank": 0,
    "tensor_parallel_rank": 0,
    "layers": [[0, 1], [4]],
    "host": "here",
}


def record(iteration: int, /, **changes: Any) -> dict[str, Any]:
    return {
        "type": "step",
        "iteration": iteration,
        "schedule_start_unix_s": 1e9,
        "schedule_ms": 9.0,
        "micro_batches": [
            {
                "position": 0,
                "width": 1,
                "member": 0,
                "samples": [7, 8],
                "lengths_tokens": [100, 20],
                "budgets": [[4, 1], [3, 1], [2, 1]],
                "coverage": [0.5, None],
                "guarded": 0,
            }
        ],
        "spans": [["forward", 0, 0, 0.0, 1.0], ["backward", 1, 0, 1.5, 2.5]],
    } | changes


def write(directory: Path, *lines: Any, name: str = "rank-00000.jsonl") -> Path:
    (directory / "ranks").mkdir(exist_ok=True)
    write_lines(directory / "ranks" / name, lines)
    return directory


def test_one_rank(tmp_path: Path) -> None:
    logs = read_rank_logs(write(tmp_path, HEADER, record(1), record(2)), {2})
    assert logs.problems == ()
    assert logs.headers[0, 0].layers == (0, 1, 4)
    assert list(logs.steps) == [2]
    step = logs.steps[2][0, 0]
    assert step.spans == (Span("forward", 0, 0, 0.0, 1.0), Span("backward", 1, 0, 1.5, 2.5))
    (micro_batch,) = step.micro_batches
    assert (micro_batch.lengths_tokens, micro_batch.tokens) == ((100, 20), 120)
    np.testing.assert_array_equal(micro_batch.budgets_LS, [[4, 1], [3, 1], [2, 1]])
    assert micro_batch.coverage_S == (0.5, None)


def test_the_first_tensor_parallel_rank_speaks_for_all(tmp_path: Path) -> None:
    run = SampleRun(ranks=2, stages=1, tensor_parallel=2, micro_batches=2, layers=2, steps=2)
    logs = read_rank_logs(run.write(tmp_path), {1, 2})
    assert len(rank_files(tmp_path)) == 4
    assert {header.world_rank for header in logs.headers.values()} == {0, 2}
    assert {place for by_place in logs.steps.values() for place in by_place} == {(0, 0), (1, 0)}


def test_the_older_file_comes_first_and_a_later_line_counts(tmp_path: Path) -> None:
    write(tmp_path, HEADER, record(1), record(2), name="rank-00000.1.jsonl")
    again = record(2, schedule_start_unix_s=2e9)
    write(tmp_path, HEADER | {"lines_discarded": 3}, again, record(3))
    assert rank_iterations(tmp_path) == (1, 2, 3)
    logs = read_rank_logs(tmp_path, {1, 2, 3})
    assert sorted(logs.steps) == [1, 2, 3]
    assert logs.steps[2][0, 0].start_unix_s == 2e9
    (problem,) = logs.problems
    assert "3 oldest lines were discarded" in problem


def test_a_rank_without_layers(tmp_path: Path) -> None:
    """A stage that only embeds, say: nobody observes coverage there."""
    micro_batch = record(1)["micro_batches"][0] | {"budgets": [], "coverage": None}
    write(tmp_path, HEADER | {"layers": [[]]}, record(1, micro_batches=[micro_batch]))
    logs = read_rank_logs(tmp_path, {1})
    assert logs.problems == ()
    (read,) = logs.steps[1][0, 0].micro_batches
    assert read.budgets_LS.shape == (0, 2)
    assert read.coverage_S == ()


MICRO_BATCH = record(1)["micro_batches"][0]
BAD_RECORDS = {
    "null-length": ({"lengths_tokens": [100, None]}, "micro_batches[0].lengths_tokens[1] None"),
    "no-length": ({"lengths_tokens": [100, 0]}, "lengths_tokens[1] 0"),
    "layers": ({"budgets": [[4, 1]]}, "budgets (1, 2) must be of 3 layers"),
    "ragged": ({"budgets": [[4, 1], [3], [2, 1]]}, "budgets: must be an array"),
    "no-budget": ({"budgets": [[4, 0], [3, 1], [2, 1]]}, "numbers of blocks"),
    "coverage": ({"coverage": [0.5, "x"]}, "coverage[1] 'x'"),
    "position": ({"position": -1}, "position -1"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_damaged_step_is_named_and_the_rest_kept(tmp_path: Path, case: str) -> None:
    change, message = BAD_RECORDS[case]
    bad = record(2, micro_batches=[MICRO_BATCH | change])
    logs = read_rank_logs(write(tmp_path, HEADER, record(1), bad, record(3)), {1, 2, 3})
    assert sorted(logs.steps) == [1, 3]
    (problem,) = logs.problems
    assert re.search(r"rank-00000.jsonl( line 3|: step 2): ", problem)
    assert message in problem


@pytest.mark.parametrize(
    "span",
    [
        ["sideways", 0, 0, 0.0, 1.0],
        ["forward", 0, 0, 0.0],
        ["forward", 0, 0, 2.0, 1.0],
        ["forward", 0, 0, -2.0, 1.0],
        ["forward", 0, True, 0.0, 1.0],
        ["forward", 0, 0, 0.0, None],
        ["forward", 0, 0, "0", 1.0],
        7,
    ],
)
def test_a_damaged_span(tmp_path: Path, span: Any) -> None:
    logs = read_rank_logs(write(tmp_path, HEADER, record(1, spans=[span])), {1})
    assert logs.steps == {}
    assert "line 2: " in logs.problems[0] and "spans" in logs.problems[0]


def test_a_rank_without_a_header_has_no_place(tmp_path: Path) -> None:
    write(tmp_path, record(1))
    write(tmp_path, HEADER | {"data_parallel_rank": 1}, record(1), name="rank-00001.jsonl")
    logs = read_rank_logs(tmp_path, {1})
    assert list(logs.headers) == [(1, 0)]
    (problem,) = logs.problems
    assert "rank-00000.jsonl: no header line; this rank is left out" in problem


def test_steps_before_the_header_are_counted(tmp_path: Path) -> None:
    logs = read_rank_logs(write(tmp_path, record(1), HEADER, record(2)), {1, 2})
    assert sorted(logs.steps) == [2]
    assert "1 steps before the first header" in logs.problems[0]


def test_no_rank_at_all(tmp_path: Path) -> None:
    assert rank_files(tmp_path) == rank_iterations(tmp_path) == ()
    assert read_rank_logs(tmp_path, {1}).headers == {}


def test_the_file_name_says_which_rank(tmp_path: Path) -> None:
    assert rank_log_path(tmp_path, 3) == tmp_path / "ranks" / "rank-00003.jsonl"
