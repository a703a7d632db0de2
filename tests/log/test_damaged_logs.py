# SPDX-License-Identifier: Apache-2.0
"""Whatever happened to a log, the rest of it is read, or there is one error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view.report.sample_run import SampleRun

from sparsebalance_megatron.log.reader import RunLogError, read_run_log
from sparsebalance_megatron.view.report.run_report import Evidence, ReportError, gather, make_report
from sparsebalance_megatron.view.report.trace import Tracer

FILES = ("steps.jsonl", "ranks/rank-00000.jsonl", "ranks/rank-00001.jsonl")
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**30, -2.5, float("nan"), float("inf"), "", "x", [], [[]], {}),
    *([1, "x"], [None], [[1.0, 2.0], [3.0]], {"type": "step"}),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SampleRun(ranks=1, stages=2, micro_batches=2, layers=3, steps=3)
    return run.write(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def copy(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(whole, directory)
    return directory


def read_everything(directory: Path) -> Evidence:
    """All that a report and a trace take from the files."""
    log = read_run_log(directory)
    make_report(directory, directory, None)
    evidence = gather(log, {step.iteration for step in log.steps})
    tracer = Tracer()
    for step in log.steps:
        if timelines := evidence.timelines(step.iteration):
            json.dumps(list(tracer.add(step, timelines)), allow_nan=False)
    return evidence


@given(data=st.data())
def test_cut_anywhere(whole: Path, copy: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    content = (whole / name).read_bytes()
    end = data.draw(st.integers(0, len(content)))
    (copy / name).write_bytes(content[:end])
    try:
        evidence = read_everything(copy)
        kept = content[:end].count(b"\n")
        cut_inside_a_line = end > 0 and content[end - 1 : end] != b"\n"
        named = [each for each in evidence.problems if f"{name} line {kept + 1}:" in each]
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
        read_everything(copy)
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
    evidence = read_everything(directory)
    assert f"{directory / 'ranks'}: no log of rank 0 stage 1; left out" in evidence.problems
    measured = evidence.timeline("measured", 2)
    assert measured is not None
    assert list(measured.spans) == [(0, 0)]
    assert measured.remarks == ("rank 0 stage 1: nothing logged of this step",)
