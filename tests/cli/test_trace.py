# SPDX-License-Identifier: Apache-2.0
"""Traces: by the rules of the format, and against the logs."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_cases import rank_step, step_record
from view.report.sample_run import SampleRun, write_lines

from sparsebalance_megatron import cli
from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.view.report.timeline import Timeline
from sparsebalance_megatron.view.report.trace import Tracer

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
                assert event["args"].keys() <= {"name", "sort_index"}
            case "C":
                assert event["args"] and all(np.isfinite(v) for v in event["args"].values())
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


def test_waiting_fills_what_a_stage_does_not_compute(events: list[Event]) -> None:
    for iteration in (2, 3, 4):
        waits = slices(events, "waiting", iteration)
        for side in ("predicted", "measured"):
            work = slices(events, side, iteration)
            end = max(event["ts"] + event["dur"] for event in work)
            filled: dict[tuple[int, int], float] = defaultdict(float)
            pids = {event["pid"] for event in work}
            for event in (*work, *(wait for wait in waits if wait["pid"] in pids)):
                filled[event["pid"], event["tid"]] += event["dur"]
            assert len(filled) == RUN.ranks * RUN.stages
            (run,) = slices(events, "step", iteration)
            origin = min(event["ts"] for event in (*work, *waits) if event["pid"] in pids)
            for length in filled.values():
                # Every slice is rounded to nanoseconds at both ends.
                assert length == pytest.approx(end - origin, abs=1e-3)
            assert side == "predicted" or end - run["ts"] == pytest.approx(run["dur"], abs=1e-3)


def test_measured_slices_are_the_spans(run_directory: Path, events: list[Event]) -> None:
    for path in sorted((run_directory / "ranks").iterdir()):
        header, *steps = [json.loads(line) for line in path.read_text().splitlines()]
        process = f"measured, rank {header['data_parallel_rank']}"
        for step in steps[1:4]:
            mine = [
                event
                for event in slices(events, "measured", step["iteration"])
                if names(events, "process_name")[event["pid"], 0] == process
                and names(events, "thread_name")[event["pid"], event["tid"]]
                == f"stage {header['pipeline_rank']}"
            ]
            assert len(mine) == SLICES
            lengths = sorted(event["dur"] for event in mine)
            spans = sorted((span[4] - span[3]) * 1e3 for span in step["spans"])
            assert lengths == pytest.approx(spans, abs=2e-3)


def test_steps_keep_their_distance_by_the_wall_clock(
    run_directory: Path, events: list[Event]
) -> None:
    starts = [event["ts"] for event in events if event.get("cat") == "step"]
    path = run_directory / "ranks" / "rank-00000.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()][2:5]
    clock = [step["schedule_start_unix_s"] for step in logged]
    # A wall clock of 1.7e9 s has a resolution of 0.24 us.
    assert np.diff(starts) == pytest.approx(np.diff(clock) * 1e6, abs=2)


@given(
    lengths=st.lists(st.lists(st.floats(0, 50), min_size=1, max_size=6), min_size=1, max_size=5),
    gaps_s=st.lists(st.one_of(st.none(), st.floats(-0.1, 0.1)), min_size=5, max_size=5),
)
def test_slices_never_overlap(lengths: list[list[float]], gaps_s: list[float | None]) -> None:
    """Whatever the clocks say: they may be missing, stand still or go back."""
    tracer, written, unix_s = Tracer(), [], 1.7e9
    for iteration, (durations, gap_s) in enumerate(zip(lengths, gaps_s, strict=False), start=1):
        ends = np.cumsum(durations)
        spans = tuple(
            Span("forward", 0, position, float(end - ms), float(end))
            for position, (ms, end) in enumerate(zip(durations, ends, strict=True))
        )
        unix_s += gap_s or 0.0
        step = rank_step(spans=spans, start_unix_s=None if gap_s is None else unix_s)
        timelines = {
            side: Timeline(spans={(0, 0): ran}, source="", contents={(0, 0): step})
            for side, ran in (("predicted", spans), ("measured", spans[:1]))
        }
        written += tracer.add(step_record(iteration), timelines)
    check_format(written)
    # cumsum leaves a rounding between an end and the next start, below half a nanosecond.
    count = sum(map(len, lengths[: len(gaps_s)]))
    assert sum(event.get("cat") == "predicted" for event in written) == count


def test_the_last_steps_are_the_default_and_gz_compresses(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    assert cli.main(["trace", str(run_directory), "-o", str(path)]) == 0
    with gzip.open(path, "rt") as stream:
        written = json.load(stream)["traceEvents"]
    check_format(written)
    sides = 2 * RUN.ranks
    metadata = 3 + 2 * sides + 2 * sides * RUN.stages
    work = sides * RUN.stages * SLICES
    # Of the work half is predicted, half measured.
    waits = sum(event.get("cat") == "waiting" for event in written)
    count = metadata + RUN.steps * (work + 1 + 2) + waits
    assert len(written) == count and waits > 0
    assert f"5 steps, {count:,} events written to {path}" in capsys.readouterr().out


def test_without_measured_times_the_predicted_ones_are_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = replace(RUN, steps=2, with_ranks=False).write(tmp_path / "run")
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
