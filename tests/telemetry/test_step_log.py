# SPDX-License-Identifier: Apache-2.0
"""Records of the step log and of the rank logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from step_cases import JOB, LENGTHS_TOKENS, measured_as_planned, planned_step

from sparsebalance_megatron.plan.coverage import CoverageCurves, length_bucket
from sparsebalance_megatron.plan.measurement import Piece, RankPlace, Span, StepTimes
from sparsebalance_megatron.telemetry.rank_log import (
    rank_header,
    rank_log_path,
    rank_record,
    remove_surplus_rank_logs,
)
from sparsebalance_megatron.telemetry.run_log import read_run_log
from sparsebalance_megatron.telemetry.step_log import StepLog, coverage_record, step_record

PLACE = RankPlace(
    data_parallel_rank=1, pipeline_rank=1, tensor_parallel_rank=0, world_rank=3, world_size=4
)
LAYERS = (2, 3, 6, 7)


def test_the_report_reads_what_is_written(tmp_path: Path) -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    log = StepLog(tmp_path)
    log.begin_run({"config": {}}, resumed=False)
    for iteration in (1, 2):
        log.append(
            step_record(
                iteration=iteration,
                iteration_ms=None if iteration == 1 else 10.0,
                planned=planned,
                measured=measured,
                padded_tokens=0,
                host_ms={"plan": 1.0},
            )
        )
    first, second = read_run_log(tmp_path).steps
    assert (first.iteration_ms, second.iteration_ms) == (None, 10.0)
    assert first.measured_rank_ms == pytest.approx(first.predicted_rank_ms)
    assert first.coverage == pytest.approx(0.45)
    assert first.tokens == sum(LENGTHS_TOKENS)


def test_devices_that_are_not_alike_have_the_slowness_they_were_planned_with() -> None:
    unknown = planned_step()
    equal_DP = np.ones((JOB.data_parallel_size, JOB.pipeline_stages))
    uneven_DP = equal_DP.copy()
    uneven_DP[0, 1] = 1.25
    equal, uneven = (
        replace(unknown, scales=replace(unknown.scales, slowness_RP=x))
        for x in (equal_DP, uneven_DP)
    )
    for planned, expected in ((unknown, None), (equal, None), (uneven, uneven_DP.tolist())):
        record = step_record(
            iteration=1,
            iteration_ms=None,
            planned=planned,
            measured=measured_as_planned(planned),
            padded_tokens=0,
        )
        assert record["predicted"]["device_slowness"] == expected


def test_coverage_curves_are_null_where_nothing_was_observed() -> None:
    curves = CoverageCurves(2, 6, 0.9)
    counts_LU = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    curves.observe(np.full((2, 3, 6), 0.123456789) * counts_LU[..., None], counts_LU)
    record = coverage_record(
        iteration=12, grid=curves.grid, mean_LUK=curves.mean_LUK, observed_LU=curves.observed_LU
    )
    known = [0.12346] * 6
    assert record["curves"] == [[known, None, known], [None, None, known]]
    assert (record["type"], record["iteration"]) == ("coverage", 12)
    assert record["grid"] == [1, 2, 3, 4, 5, 6]
    assert record["bucket_blocks"] == [1, 3, 6]
    for bucket, largest in enumerate(record["bucket_blocks"]):
        assert length_bucket(largest) == bucket
    json.dumps(record, allow_nan=False)


def test_a_rank_says_what_it_ran_when_and_with_which_coverage() -> None:
    """Chunks of one micro-batch are observed apart, in the order they ran."""
    planned = planned_step()
    micro_batches = planned.plan.for_rank(1).micro_batches
    order = [(position, chunk) for position in (0, 1) for chunk in (0, 1)]
    pieces, rows = [], []
    for position, chunk in order:
        samples = len(micro_batches[position].samples)
        for layer in JOB.stage_layers[1][chunk]:
            pieces.append(Piece(position, layer, samples))
            rows += [(0.1 * layer + 0.01 * i, float(layer == 7 and i == 0)) for i in range(samples)]
    spans = (Span("forward", 0, 0, 1.00004, 2.0), Span("backward", 1, 1, 3.0, 4.5))
    times = StepTimes(
        forward_VM=np.zeros((2, 2)),
        backward_VM=np.zeros((2, 2)),
        schedule_ms=5.0,
        start_unix_s=1.75e9,
        spans=spans,
    )
    record = rank_record(
        iteration=9,
        planned=planned,
        place=PLACE,
        job=JOB,
        times=times,
        pieces=pieces,
        executed_and_grown_R2=np.array(rows),
    )
    assert (record["iteration"], record["schedule_ms"]) == (9, 5.0)
    assert record["schedule_start_unix_s"] == 1.75e9
    assert record["spans"] == [("forward", 0, 0, 1.0, 2.0), ("backward", 1, 1, 3.0, 4.5)]
    for position, (entry, plan) in enumerate(
        zip(record["micro_batches"], micro_batches, strict=True)
    ):
        samples = len(plan.samples)
        assert entry["position"] == position
        assert entry["samples"] == [100 + sample for sample in plan.samples]
        assert entry["lengths_tokens"] == [LENGTHS_TOKENS[sample] for sample in plan.samples]
        assert entry["budgets"] == [[4] * samples] * len(LAYERS)
        expected = [0.1 * np.mean(LAYERS) + 0.01 * i for i in range(samples)]
        assert entry["coverage"] == pytest.approx(expected)
        assert entry["guarded"] == 1
    json.dumps(record, allow_nan=False)


def test_a_rank_without_layers_has_no_coverage() -> None:
    times = StepTimes(
        forward_VM=np.zeros((2, 2)),
        backward_VM=np.zeros((2, 2)),
        schedule_ms=math.nan,
        start_unix_s=None,
        spans=(),
    )
    record = rank_record(
        iteration=1,
        planned=planned_step(),
        place=PLACE,
        job=JOB,
        times=times,
        pieces=(),
        executed_and_grown_R2=np.empty((0, 2)),
    )
    assert [entry["coverage"] for entry in record["micro_batches"]] == [None, None]


def test_header_and_file_name_say_which_rank(tmp_path: Path) -> None:
    assert rank_header(PLACE, JOB, "node-1") == {
        "type": "rank",
        "world_rank": 3,
        "data_parallel_rank": 1,
        "pipeline_rank": 1,
        "tensor_parallel_rank": 0,
        "layers": [[2, 3], [6, 7]],
        "host": "node-1",
    }
    assert rank_log_path(tmp_path, 3) == tmp_path / "ranks" / "rank-00003.jsonl"


def test_logs_of_ranks_that_are_no_more_go(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for name in ("rank-00001.jsonl", "rank-00002.jsonl", "rank-00012.1.jsonl", "rank-note.jsonl"):
        (tmp_path / "ranks" / name).write_text("")
    remove_surplus_rank_logs(tmp_path, world_size=2)
    remove_surplus_rank_logs(tmp_path / "nowhere", world_size=2)
    left = sorted(path.name for path in (tmp_path / "ranks").iterdir())
    assert left == ["rank-00001.jsonl", "rank-note.jsonl"]
