# SPDX-License-Identifier: Apache-2.0
"""Lines of a rank's log: what is written is what is read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from step_cases import JOB, LENGTHS_TOKENS, planned_step

from sparsebalance_megatron.learn.measurement import Piece, RankPlace, Span, StepTimes
from sparsebalance_megatron.telemetry.rank_record import (
    RankHeader,
    rank_header,
    rank_record,
    read_rank_header,
    read_rank_step,
)

PLACE = RankPlace(
    data_parallel_rank=1, pipeline_rank=1, tensor_parallel_rank=0, world_rank=3, world_size=4
)
LAYERS = (2, 3, 6, 7)


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
        executed_and_grown_O2=np.array(rows),
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
    step = read_rank_step(json.loads(json.dumps(record, allow_nan=False)), len(LAYERS))
    assert (step.start_unix_s, step.unmeasured) == (1.75e9, 0)
    assert step.spans == (Span("forward", 0, 0, 1.0, 2.0), spans[1])
    for read, plan in zip(step.micro_batches, micro_batches, strict=True):
        assert read.position == micro_batches.index(plan)
        assert (read.lengths_tokens, read.tokens) == (plan.lengths_tokens, plan.tokens)
        np.testing.assert_array_equal(read.budgets_LS, plan.budgets_LS[list(LAYERS)])
        assert list(read.coverage_S) == record["micro_batches"][read.position]["coverage"]


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
        executed_and_grown_O2=np.empty((0, 2)),
    )
    assert [entry["coverage"] for entry in record["micro_batches"]] == [None, None]
    step = read_rank_step(record | {"schedule_ms": None}, len(LAYERS))
    assert (step.start_unix_s, step.spans) == (None, ())
    assert [micro_batch.coverage_S for micro_batch in step.micro_batches] == [(), ()]


def test_a_rank_says_which_share_of_a_row_it_had() -> None:
    """The second of two that share a row has no coverage to say."""
    planned = planned_step()
    first, second = (planned.plan.for_rank(rank).micro_batches for rank in (0, 1))
    slots = (replace(first[0], width=2), first[1], second[1])
    times = StepTimes(
        forward_VM=np.zeros((2, 2)),
        backward_VM=np.zeros((2, 2)),
        schedule_ms=math.nan,
        start_unix_s=None,
        spans=(),
    )
    record = rank_record(
        iteration=1,
        planned=replace(planned, plan=replace(planned.plan, slots=slots)),
        place=PLACE,
        job=JOB,
        times=times,
        pieces=(),
        executed_and_grown_O2=np.empty((0, 2)),
    )
    read = read_rank_step(record | {"schedule_ms": None}, len(LAYERS)).micro_batches
    assert [(each.width, each.member) for each in read] == [(2, 1), (1, 0)]
    assert read[0].lengths_tokens == first[0].lengths_tokens
    old = [
        {key: value for key, value in each.items() if key not in ("width", "member")}
        for each in record["micro_batches"]
    ]
    read = read_rank_step(record | {"schedule_ms": None, "micro_batches": old}, len(LAYERS))
    assert {(each.width, each.member) for each in read.micro_batches} == {(1, 0)}


def test_the_header_says_which_rank() -> None:
    header = rank_header(PLACE, JOB, "node-1")
    assert header == {
        "type": "rank",
        "world_rank": 3,
        "data_parallel_rank": 1,
        "pipeline_rank": 1,
        "tensor_parallel_rank": 0,
        "layers": [[2, 3], [6, 7]],
        "host": "node-1",
    }
    assert read_rank_header(json.loads(json.dumps(header))) == RankHeader(
        world_rank=3, place=(1, 1), tensor_parallel_rank=0, layers=LAYERS, host="node-1"
    )
