# SPDX-License-Identifier: Apache-2.0
"""The live view: the slowest device is found, silence is told from work, strips show the step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from view.report.sample_run import SampleRun

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.follow import StepLogFollower, hosts_of
from sparsebalance_megatron.view.report.live import (
    BACKWARD,
    FORWARD,
    WAITING,
    LiveView,
    live_view,
    sparkline,
    status_line,
    timeline_strip,
    view_lines,
)
from sparsebalance_megatron.view.report.timeline import MEASURED, Timeline

RUN = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=5, noise=0.0)


def view_of(directory: Path, *, quiet_s: float = 1.0) -> LiveView:
    clock = iter([0.0, quiet_s])
    follower = StepLogFollower(directory, clock=lambda: next(clock), unix_clock=lambda: 0.0)
    follower.poll()
    view = live_view(follower, hosts_of(directory))
    assert view is not None
    return view


def test_a_log_without_steps_has_no_view(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    follower = StepLogFollower(tmp_path)
    follower.poll()
    assert live_view(follower, {}) is None


def test_the_device_that_takes_longer_is_named_with_its_host(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    path = tmp_path / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["type"] == "step":
            for name in ("forward_ms", "backward_ms"):
                predicted = np.array(record["predicted"][name])
                predicted[1, 0] *= 1.5
                record["measured"][name] = predicted.tolist()
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for rank_path in (tmp_path / "ranks").glob("*.jsonl"):
        first, *rest = rank_path.read_text().splitlines()
        header = json.loads(first) | {"host": f"node-{json.loads(first)['data_parallel_rank']}"}
        rank_path.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    view = view_of(tmp_path)
    assert view.slowest is not None
    assert view.slowest.place == (1, 0)
    assert view.slowest.host == "node-1"
    assert view.slowest.slowness == pytest.approx(1.5)
    assert "slowest rank 1 stage 0 on node-1 1.50x" in status_line(view)


def test_ranks_that_share_a_row_begin_it_together_in_the_live_strip_too(tmp_path: Path) -> None:
    """Rank 0 is at the shared row after 1 ms, rank 1 after 3."""
    replace(RUN, stages=1, steps=1, with_ranks=False).write(tmp_path)
    path = tmp_path / "steps.jsonl"
    *others, last = [json.loads(line) for line in path.read_text().splitlines()]
    for name, factor in (("forward_ms", 1.0), ("backward_ms", 2.0)):
        last["measured"][name] = (factor * np.array([[[[1.0, 2.0]]], [[[3.0, 2.0]]]])).tolist()
    last["widths"] = [[1, 2], [1, 2]]
    path.write_text("".join(json.dumps(record) + "\n" for record in (*others, last)))
    view = view_of(tmp_path)
    assert view.timeline is not None
    starts = {
        place[0]: span.start_ms
        for place, spans in view.timeline.spans.items()
        for span in spans
        if (span.position, span.direction) == (1, "forward")
    }
    assert starts == {0: 9.0, 1: 9.0}
    assert "shared      one row on up to 2 ranks each" in view_lines(view, 100)


def test_a_run_that_works_is_not_called_silent_and_one_that_stopped_is(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    assert view_of(tmp_path, quiet_s=30.0).silent_s is None
    view = view_of(tmp_path, quiet_s=600.0)
    assert view.silent_s == 600.0
    assert "silent for 10 min: the run has ended, or hangs" in status_line(view)


def test_everything_fits_the_terminal(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    lines = view_lines(view_of(tmp_path), 100)
    text = "\n".join(lines)
    for word in ("iteration 5", "r0 s0", "r1 s1", "loss", "coverage", "busiest", "slowest"):
        assert word in text
    strips = [line for line in lines if line.startswith("r")]
    assert len(strips) == 4
    assert {len(line) for line in strips} == {98}
    for strip in strips:
        assert FORWARD in strip and BACKWARD in strip


def test_a_strip_is_to_scale() -> None:
    spans = [Span("forward", 0, 0, 0.0, 20.0), Span("backward", 0, 0, 50.0, 100.0)]
    timeline = Timeline(spans={(0, 0): spans}, source=MEASURED)
    strip, legend, _ = timeline_strip(timeline, 10 + 2 + 10)
    assert strip[10:] == FORWARD * 2 + WAITING * 3 + BACKWARD * 5
    assert "100 ms" in legend


def test_of_many_stages_the_busiest_are_drawn_and_the_rest_is_said() -> None:
    spans = {(rank, 0): [Span("forward", 0, 0, 0.0, 10.0 + rank)] for rank in range(20)}
    *strips, legend, _ = timeline_strip(Timeline(spans=spans, source=MEASURED), 60)
    assert [line.split()[0] for line in strips] == [f"r{rank}" for rank in range(12, 20)]
    assert "the 8 busiest of 20 stages" in legend


@pytest.mark.parametrize(
    ("values", "expected"),
    [((), ""), ((1.0,), ""), ((2.0, 2.0), "▁▁"), ((1.0, 2.0, 8.0), "▁▂█")],
)
def test_sparkline(values: tuple[float, ...], expected: str) -> None:
    assert sparkline(values, 10) == expected
    assert len(sparkline(tuple(map(float, range(50))), 10)) == 10
