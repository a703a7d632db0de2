# SPDX-License-Identifier: Apache-2.0
"""The table of sources: sums and means of what steps logged, and blanks for what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from report.sample_run import SampleRun

from sparsebalance_megatron.report.run_report import make_report
from sparsebalance_megatron.report.source_table import source_rows
from sparsebalance_megatron.telemetry.step_log import read_run_log
from sparsebalance_megatron.telemetry.step_record import SourceStep

HEADER = {"sources": [{"prefix": "/data/web", "weight": 0.75}, {"prefix": "books", "weight": 0.25}]}


def test_rows_sum_tokens_and_weigh_losses_by_them(tmp_path: Path) -> None:
    log = read_run_log(SampleRun(steps=2).write(tmp_path))
    first, second = log.steps
    steps = [
        replace(first, sources=(SourceStep(tokens=30, lm_loss=2.0, coverage=0.5), none_of_it())),
        replace(
            second,
            sources=(
                SourceStep(tokens=10, lm_loss=4.0, coverage=0.7),
                SourceStep(tokens=40, lm_loss=1.5, coverage=0.9),
            ),
        ),
    ]
    assert source_rows(HEADER, steps) == [
        ("/data/web", "75.00%", "40", "50.00%", "2.5000", "2.5000", "0.600"),
        ("books", "25.00%", "40", "50.00%", "1.5000", "1.5000", "0.900"),
    ]
    assert source_rows({}, steps)[1][:2] == ("source 2", "")
    assert source_rows(HEADER, log.steps) == []


def none_of_it() -> SourceStep:
    return SourceStep(tokens=0, lm_loss=None, coverage=None)


def test_the_page_has_the_table_where_a_run_mixes(tmp_path: Path) -> None:
    directory = SampleRun(steps=3).write(tmp_path / "run")
    assert make_report(directory, None, None).page.sources is None
    path = directory / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["type"] == "run":
            record |= HEADER
        elif record["type"] == "step":
            record["sources"] = [{"tokens": 5, "lm_loss": 1.0, "coverage": None}] * 2
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = make_report(directory, None, None).page
    assert page.sources is not None
    assert [row[:3] for row in page.sources.rows] == [
        ("/data/web", "75.00%", "15"),
        ("books", "25.00%", "15"),
    ]
