# SPDX-License-Identifier: Apache-2.0
"""Records of a run: what is written is what is read, and damage is named."""

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from msgspec.json import Decoder
from step_cases import JOB, LENGTHS_TOKENS, finished_step, measured_as_planned, planned_step

from sparsebalance_megatron.learn.measurement import Piece, RankPlace, Span, StepTimes
from sparsebalance_megatron.log.records import (
    RANK_LOG,
    STEP_LOG,
    Record,
    decode,
    encode,
    rank_step,
    step_record,
)

PLACE = RankPlace(
    data_parallel_rank=1, pipeline_rank=1, tensor_parallel_rank=0, world_rank=3, world_size=4
)
LAYERS = (2, 3, 6, 7)


def as_json(record: Record) -> dict[str, Any]:
    """The line that is written."""
    return json.loads(encode(record))


def back(record: Record, decoder: Decoder[Any]) -> Any:
    """What is read of what is written."""
    return decode(encode(record), decoder)


def test_a_record_holds_what_the_run_knew() -> None:
    """Plan, measurement and figures come back as they were; ranks waited within layers."""
    planned = planned_step()
    measured = measured_as_planned(planned)
    own_2RPVM = measured.times_2RPVM
    measured = replace(
        measured,
        lm_loss=2.25,
        times_2RPVM=own_2RPVM + 1.0,
        waiting_2RPVM=np.ones_like(own_2RPVM),
    )
    finished = finished_step(planned, measured)
    step = back(step_record(finished), STEP_LOG)
    assert (step.iteration, step.iteration_ms, step.lm_loss) == (7, 10.5, 2.25)
    assert (step.tokens, step.padded_tokens, step.complete) == (sum(LENGTHS_TOKENS), 3, True)
    expected = (planned.plan.expectation, measured, finished.figures)
    for ours, theirs in zip((step.predicted, step.measured, step.figures), expected, strict=True):
        for each in fields(ours):
            found, known = (np.array(getattr(of, each.name), float) for of in (ours, theirs))
            np.testing.assert_array_equal(found, known, err_msg=each.name)
    assert step.places == ((0, 0), (0, 1), (1, 0), (1, 1))
    np.testing.assert_allclose(step.measured.own_2RPVM, own_2RPVM)
    assert (step.segments_RM == 1).all()


def test_what_was_not_measured_comes_back_as_none() -> None:
    planned = planned_step()
    measured = measured_as_planned(planned)
    times_2RPVM = measured.times_2RPVM.copy()
    times_2RPVM[0] = math.nan
    measured = replace(measured, times_2RPVM=times_2RPVM, lm_loss=math.nan)
    finished = finished_step(planned, measured=measured, iteration_ms=None)
    step = back(step_record(finished), STEP_LOG)
    assert (step.iteration_ms, step.lm_loss, step.complete) == (None, None, False)
    assert step.figures.busiest_rank_ms_measured is None
    np.testing.assert_array_equal(step.measured.own_2RPVM, times_2RPVM)


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
            rows += [0.1 * layer + 0.01 * i for i in range(samples)]
    spans = (Span("forward", 0, 0, 1.00004, 2.0), Span("backward", 1, 1, 3.0, 4.5))
    times = StepTimes(schedule_ms=5.0, start_unix_s=1.75e9, spans=spans)
    finished = finished_step(planned, times=times, pieces=pieces, executed_O=np.array(rows))
    record = rank_step(finished, PLACE, JOB)
    line = as_json(record)
    assert (line["type"], line["iteration"], line["schedule_ms"]) == ("step", 7, 5.0)
    assert line["schedule_start_unix_s"] == 1.75e9
    assert line["spans"] == [["forward", 0, 0, 1.0, 2.0, 0], ["backward", 1, 1, 3.0, 4.5, 0]]
    for position, (entry, plan) in enumerate(
        zip(line["micro_batches"], micro_batches, strict=True)
    ):
        samples = len(plan.samples)
        assert entry["position"] == position
        assert entry["samples"] == [100 + sample for sample in plan.samples]
        assert entry["lengths_tokens"] == [LENGTHS_TOKENS[sample] for sample in plan.samples]
        assert entry["budgets_LS"] == [[4] * samples] * len(LAYERS)
        expected = [0.1 * np.mean(LAYERS) + 0.01 * i for i in range(samples)]
        assert entry["coverage"] == pytest.approx(expected)
    assert encode(back(record, RANK_LOG)) == encode(record)


def test_a_rank_without_layers_has_no_coverage() -> None:
    step = back(rank_step(finished_step(planned_step()), PLACE, JOB), RANK_LOG)
    assert [micro_batch["coverage"] for micro_batch in step.micro_batches] == [None, None]
    assert (step.start_unix_s, step.schedule_ms, step.spans) == (None, None, ())


def test_who_shared_a_micro_batch_comes_back() -> None:
    planned = planned_step()
    first, second = (planned.plan.for_rank(rank).micro_batches for rank in (0, 1))
    micro_batches = (replace(first[0], cp_size=2), first[1], second[1])
    shared = replace(planned, plan=replace(planned.plan, micro_batches=micro_batches))
    finished = replace(finished_step(planned), planned=shared)
    assert back(step_record(finished), STEP_LOG).cp_sizes_RM.tolist() == [[2, 1], [2, 1]]
    read = back(rank_step(finished, PLACE, JOB), RANK_LOG).micro_batches
    assert [(each["cp_size"], each["rank"]) for each in read] == [(2, 0), (1, 1)]
