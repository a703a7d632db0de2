# SPDX-License-Identifier: Apache-2.0
"""Traces: by the rules of the format, and against the logs."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_cases import step_record
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.cli.trace import trace_events
from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.view.report.timeline import Timeline

RUN = SampleRun(ranks=2, stages=2, virtual_stages=2, micro_batches=4, layers=4, steps=5)
SLICES = 2 * RUN.virtual_stages * RUN.micro_batches
"""Slices of one stage in one step."""

Event = dict[str, Any]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RUN.write(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def trace_path(run_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    assert cli.main(["trace", str(run_directory), "--steps", "2:4", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def events(trace_path: Path) -> list[Event]:
    trace = json.loads(trace_path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    return trace["traceEvents"]


def check_format(events: list[Event]) -> None:
    """The rules of the Trace Event Format for the kinds of events that are written."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and event["pid"] > 0
        match event["ph"]:
            case "M":
                assert event["args"].keys() == {"name"}
            case "X":
                start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
                assert start >= 0 and length >= 0
                threads[event["pid"], event["tid"]].append((start, start + length))
            case other:
                raise AssertionError(f"no event of phase {other} is written")
    for spans in threads.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, "slices of a thread overlap"


def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == kind
    }


def slices(events: list[Event], category: str, iteration: int) -> list[Event]:
    return [
        event
        for event in events
        if event.get("cat") == category and event["args"]["iteration"] == iteration
    ]


def test_measured_slices_are_the_spans(run_directory: Path, events: list[Event]) -> None:
    for path in sorted((run_directory / "ranks").iterdir()):
        header, *steps = [json.loads(line) for line in path.read_text().splitlines()]
        process = f"measured, rank {header['data_parallel_rank']}"
        for step in steps[1:4]:
            mine = [
                event
                for event in slices(events, "measured", step["iteration"])
                if names(events, "process_name")[event["pid"], event["tid"]] == process
                and names(events, "thread_name")[event["pid"], event["tid"]]
                == f"stage {header['pipeline_rank']}"
            ]
            assert len(mine) == SLICES
            lengths = sorted(event["dur"] for event in mine)
            spans = sorted((span[4] - span[3]) * 1e3 for span in step["spans"])
            assert lengths == pytest.approx(spans, abs=2e-3)


def test_steps_follow_one_another_and_both_sides_begin_together(events: list[Event]) -> None:
    ends = 0.0
    for iteration in (2, 3, 4):
        (step,) = slices(events, "step", iteration)
        both = [slices(events, side, iteration) for side in ("predicted", "measured")]
        starts = [min(event["ts"] for event in work) for work in both]
        assert step["ts"] >= ends and starts[0] == step["ts"] and starts[1] >= step["ts"]
        ends = max(event["ts"] + event["dur"] for work in both for event in work)
        measured_end = max(event["ts"] + event["dur"] for event in both[1])
        assert step["ts"] + step["dur"] == pytest.approx(measured_end, abs=1e-3)


@given(st.lists(st.lists(st.floats(0, 50), min_size=1, max_size=6), min_size=1, max_size=5))
def test_slices_never_overlap(lengths: list[list[float]]) -> None:
    steps = []
    for iteration, durations in enumerate(lengths, start=1):
        ends = np.cumsum(durations)
        spans = tuple(
            Span("forward", 0, position, float(end - ms), float(end))
            for position, (ms, end) in enumerate(zip(durations, ends, strict=True))
        )
        timelines = {
            side: Timeline(spans={(0, 0): ran})
            for side, ran in (("predicted", spans), ("measured", spans[:1]))
        }
        steps.append((step_record(iteration), timelines))
    written = list(trace_events(steps))
    check_format(written)
    predicted = sum(event.get("cat") == "predicted" for event in written)
    assert predicted == sum(map(len, lengths))


def test_the_last_steps_are_the_default_and_gz_compresses(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    assert cli.main(["trace", str(run_directory), "-o", str(path)]) == 0
    with gzip.open(path, "rt") as stream:
        written = json.load(stream)["traceEvents"]
    check_format(written)
    sides = 2 * RUN.ranks
    count = 2 + 2 * sides * RUN.stages + RUN.steps * (sides * RUN.stages * SLICES + 1)
    assert len(written) == count
    assert f"5 steps, {count:,} events written to {path}" in capsys.readouterr().out


def test_without_measured_times_the_predicted_ones_are_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = replace(RUN, steps=2).write(tmp_path / "run")
    shutil.rmtree(directory / "ranks")
    log = directory / "steps.jsonl"
    header, *steps = log.read_text().splitlines()
    records = [json.loads(line) for line in steps]
    for record in records:
        if record["type"] == "step":
            record["measured"]["times_2RPVM"][0][0][0][0][0] = None
    write_lines(log, [header, *records])
    path = tmp_path / "trace.json"
    assert cli.main(["trace", str(directory), "-o", str(path)]) == 0
    written = json.loads(path.read_text())["traceEvents"]
    check_format(written)
    assert len(slices(written, "predicted", 2)) == RUN.ranks * RUN.stages * SLICES
    assert slices(written, "measured", 2) == []
    assert "2 of 2 steps have no measured times" in capsys.readouterr().out
