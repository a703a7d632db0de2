# SPDX-License-Identifier: Apache-2.0
"""Logs of all ranks and of single ones: whole, damaged, resumed, missing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_cases import (
    FIGURES,
    HEADER,
    PREDICTED,
    rank_header,
    rank_step,
)
from record_cases import step_line as record
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.reader import RunLogError, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import encode
from sparsebalance_megatron.view.report.run_report import ReportError, gather, make_report


def write(directory: Path, *lines: Any) -> Path:
    write_lines(directory / "steps.jsonl", lines)
    return directory


def measured(**changes: Any) -> dict[str, Any]:
    line = record(2)
    return line | {"measured": line["measured"] | changes}


BAD_LINES: dict[str, tuple[Any, str]] = {
    "unknown-type": ({"type": "stp"}, "type 'stp'"),
    "no-figures": (record(2, figures={}), "figures: "),
    "figure-text": (
        record(2, figures=FIGURES | {"imbalance": "x"}),
        "figures.imbalance 'x'",
    ),
    "times-flat": (measured(times_2RPVM=[1.0]), "times must be [2]"),
    "times-text": (measured(times_2RPVM="x"), "measured.times_2RPVM"),
    "time-none": (record(2, iteration_ms=0.0), "iteration_ms 0.0"),
    "waiting-shape": (measured(waiting_2RPVM=[PREDICTED["times_2RPVM"]]), "measured.own"),
    "predicted-shape": (record(2, predicted=PREDICTED | {"times_2RPVM": [1.0]}), "predicted"),
    "segments-ragged": (record(2, segments_RM=[[2, 1], [1]]), "segments_RM"),
    "no-tokens": ({key: value for key, value in record(2).items() if key != "tokens"}, "tokens"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_damaged_line_is_named_and_the_rest_kept(tmp_path: Path, case: str) -> None:
    line, message = BAD_LINES[case]
    log = read_run_log(write(tmp_path, HEADER, record(1), line, record(3)))
    assert [step.iteration for step in log.steps] == [1, 3]
    (problem,) = log.problems
    assert "line 3: " in problem
    assert message in problem


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "no step is logged yet"),
        ((HEADER,), "no step is logged yet"),
        ((HEADER, "{"), "no readable step: .* line 2"),
    ],
)
def test_no_step(tmp_path: Path, lines: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RunLogError, match=message):
        read_run_log(write(tmp_path, *lines))


def test_the_older_file_comes_first_and_a_step_that_runs_again_counts(tmp_path: Path) -> None:
    write(tmp_path, HEADER, *(record(each, lm_loss=1.0) for each in (1, 2, 3, 4)))
    (tmp_path / "steps.jsonl").rename(tmp_path / "steps.jsonl.1")
    newer = HEADER | {"config": {"batching": "length"}, "lines_discarded": 7}
    late = record(3) | {"lines_dropped": 2}
    log = read_run_log(write(tmp_path, newer, record(2, lm_loss=5.0), late))
    assert [step.iteration for step in log.steps] == [1, 2, 3]
    assert [step.lm_loss for step in log.steps] == [1.0, 5.0, 6.0]
    assert log.header is not None and log.header.config == {"batching": "length"}
    discarded, dropped, repeated = log.problems
    assert "the 7 oldest lines were discarded" in discarded
    assert "2 lines could not be written" in dropped
    assert "3 steps before a resume" in repeated


def test_a_log_without_a_header_is_read(tmp_path: Path) -> None:
    bare = read_run_log(write(tmp_path, record(1)))
    assert len(bare.steps) == 1 and "no header" in bare.problems[0]


def test_logs_of_another_format_are_named_and_what_follows_is_read(tmp_path: Path) -> None:
    old = {name: value for name, value in HEADER.items() if name != "log_format"}
    with pytest.raises(RunLogError, match=r"2 lines in another log format .* wrote them"):
        read_run_log(write(tmp_path, old, {"type": "step", "iteration": 1}))
    log = read_run_log(
        write(tmp_path, old, {"type": "step", "iteration": 1}, HEADER, record(2), record(3))
    )
    assert [step.iteration for step in log.steps] == [2, 3] and log.header is not None
    (problem,) = log.problems
    assert "2 lines in another log format" in problem


RANK_HEADER = json.loads(encode(rank_header()))
RANK_STEP = rank_step(
    spans=(Span("forward", 0, 0, 0.0, 1.0), Span("backward", 1, 0, 1.5, 2.5)),
    start_unix_s=1e9,
)


def rank_record(iteration: int, /, **changes: Any) -> dict[str, Any]:
    return json.loads(encode(RANK_STEP)) | {"iteration": iteration} | changes


def write_rank(directory: Path, *lines: Any, name: str = "rank-00000.jsonl") -> Path:
    (directory / "ranks").mkdir(exist_ok=True)
    write_lines(directory / "ranks" / name, lines)
    return directory


def test_the_first_tensor_parallel_rank_speaks_for_all(tmp_path: Path) -> None:
    write_rank(tmp_path, RANK_HEADER, rank_record(1))
    second = RANK_HEADER | {"world_rank": 1, "tensor_parallel_rank": 1}
    write_rank(tmp_path, second, rank_record(1), name="rank-00001.jsonl")
    logs = read_rank_logs(tmp_path, 1)
    assert [header.world_rank for header in logs.headers.values()] == [0]


def test_of_a_step_that_a_rank_repeats_the_last_line_counts(tmp_path: Path) -> None:
    again = rank_record(2, schedule_start_unix_s=2e9)
    write_rank(tmp_path, RANK_HEADER, rank_record(1), rank_record(2), again, rank_record(3))
    assert read_rank_logs(tmp_path, 2).steps[0, 0].start_unix_s == 2e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": [["sideways", 0, 0, 0.0, 1.0]]}, "spans holds"),
        ({"spans": [["forward", 0, 0, 2.0, 1.0]]}, "spans holds"),
        ({"spans": [["forward", 0, 0, None, 1.0]]}, "spans[0][3] None"),
        ({"schedule_ms": "x"}, "schedule_ms 'x'"),
    ],
)
def test_a_damaged_step_is_named_and_the_rest_kept(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_rank(tmp_path, RANK_HEADER, rank_record(1), rank_record(2, **change), rank_record(3))
    assert read_rank_logs(tmp_path, 3).steps[0, 0].iteration == 3
    logs = read_rank_logs(tmp_path, 2)
    assert not logs.steps
    (problem,) = logs.problems
    assert "rank-00000.jsonl line 3: " in problem
    assert message in problem


def test_a_rank_without_a_header_has_no_place(tmp_path: Path) -> None:
    write_rank(tmp_path, rank_record(1))
    write_rank(
        tmp_path, RANK_HEADER | {"data_parallel_rank": 1}, rank_record(1), name="rank-00001.jsonl"
    )
    logs = read_rank_logs(tmp_path, 1)
    assert list(logs.headers) == [(1, 0)]
    (problem,) = logs.problems
    assert "rank-00000.jsonl: no header line; this rank is left out" in problem


def test_of_a_growing_log_the_last_whole_lines_are_read(tmp_path: Path) -> None:
    """A disk may show any part of what was written; no part of a line is ever a line."""
    run = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=6)
    path = run.write(tmp_path) / "steps.jsonl"
    content = path.read_bytes()
    header = read_run_log(tmp_path).header
    lines = content.splitlines(keepends=True)
    for missing in (0, 1, len(lines[-1]) // 3):
        path.write_bytes(content[: len(content) - missing])
        tail = read_run_log(tmp_path, last_bytes=sum(map(len, lines[-3:])) + 1 - missing)
        found = [step.iteration for step in tail.steps]
        assert found == ([4, 5] if missing else [4, 5, 6])
        assert tail.problems == () and tail.header == header


FILES = ("steps.jsonl", "ranks/rank-00000.jsonl", "ranks/rank-00001.jsonl")
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**30, -2.5, float("nan"), float("inf"), "", "x", [], [[]], {}),
    *([1, "x"], [None], [[1.0, 2.0], [3.0]], {"type": "step"}),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SampleRun(ranks=1, stages=2, micro_batches=2, layers=4, steps=3)
    return run.write(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def copy(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(whole, directory)
    return directory


def problems_of_everything(directory: Path) -> list[str]:
    """What is said of the files when every step is drawn."""
    log = read_run_log(directory)
    make_report(directory, directory, None)
    return [
        *log.problems,
        *(each for step in log.steps for each in gather(log, step.iteration)[0].problems),
    ]


@given(data=st.data())
def test_cut_anywhere(whole: Path, copy: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    content = (whole / name).read_bytes()
    end = data.draw(st.integers(0, len(content)))
    (copy / name).write_bytes(content[:end])
    try:
        problems = problems_of_everything(copy)
        kept = content[:end].count(b"\n")
        cut_inside_a_line = end > 0 and content[end - 1 : end] != b"\n"
        named = [each for each in problems if f"{name} line {kept + 1}:" in each]
        # Only the newline itself can go unnoticed.
        assert bool(named) == (cut_inside_a_line and content[end : end + 1] != b"\n")
    except RunLogError:
        assert name == FILES[0] and content[:end].count(b"\n") < 2, "the first step is whole"
    finally:
        (copy / name).write_bytes(content)


@settings(max_examples=300)
@given(data=st.data())
def test_any_value_replaced(whole: Path, copy: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    content = (whole / name).read_text()
    records = [json.loads(line) for line in content.splitlines()]
    number = data.draw(st.integers(0, len(records) - 1))
    places = list(_places(records[number]))
    holder, key = places[data.draw(st.integers(0, len(places) - 1))]
    if data.draw(st.booleans()) and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = data.draw(st.sampled_from(JUNK))
    (copy / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        problems_of_everything(copy)
    except (RunLogError, ReportError) as error:
        assert str(copy) in str(error)
    finally:
        (copy / name).write_text(content)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a record."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield value, key
            yield from _places(value[key])


def test_a_missing_rank_is_named(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    (directory / "ranks" / "rank-00001.jsonl").unlink()
    ranks, measured = gather(read_run_log(directory), 2)
    assert f"{directory / 'ranks'}: no log of rank 0 stage 1; left out" in ranks.problems
    assert list(measured.spans) == [(0, 0)]
    assert measured.remarks == ("rank 0 stage 1: nothing logged of this step",)
