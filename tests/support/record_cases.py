# SPDX-License-Identifier: Apache-2.0
"""Records and lines of logs of which a test sets what it looks at."""

import json
from dataclasses import fields
from typing import Any

from step_cases import JOB

from sparsebalance_megatron.learn.measurement import Span, StepFigures
from sparsebalance_megatron.log.records import (
    STEP_LOG,
    RankHeader,
    RankStep,
    RunHeader,
    StepRecord,
    decode,
    encode,
)
from sparsebalance_megatron.plan.job import Job


def rank_header() -> RankHeader:
    """The first rank of all, with one layer."""
    ranks = ("world_rank", "data_parallel_rank", "pipeline_rank", "tensor_parallel_rank")
    return RankHeader(**dict.fromkeys(ranks, 0), chunk_layers=((0,),), host="here")


def rank_step(spans: tuple[Span, ...] = (), start_unix_s: float | None = None) -> RankStep:
    """The first step."""
    return RankStep(
        iteration=1, start_unix_s=start_unix_s, schedule_ms=None, micro_batches=(), spans=spans
    )


TIMES_2RPVM = [
    [[[[10.0, 20.0]]], [[[10.0, 10.0]]]],
    [[[[20.0, 40.0]]], [[[20.0, 30.0]]]],
]
PREDICTED = {
    "makespan_ms": 90.0,
    "lower_bound_ms": 70.0,
    "rank_makespan_ms": [90.0, 80.0],
    "times_2RPVM": TIMES_2RPVM,
    "coverage_mean": None,
    "coverage_min": None,
    "work_ratio": 1.0,
    **dict.fromkeys(("samples_cut", "samples_raised"), 0),
}
FIGURES: dict[str, Any] = {each.name: 1.0 for each in fields(StepFigures)}
FIGURES |= dict.fromkeys(("bubble_fraction_stage", "relative_time_stage"), ())
FIGURES |= dict.fromkeys(("tuned_samples", "unobserved"), 0)
FIGURES |= {"coverage": 0.75, "coverage_base": 0.75, "lower_bound_ms": 70.0}
FIGURES |= {"computing_ms_measured": 80.0, "makespan_ms_measured": 95.0}


def step_line(iteration: int, /, **changes: Any) -> dict[str, Any]:
    """A step of two ranks as a step log has it."""
    return {
        "type": "step",
        "iteration": iteration,
        "iteration_ms": None if iteration == 1 else 100.0,
        "lm_loss": 9.0 - iteration,
        "tokens": 64,
        "padded_tokens": 0,
        "plan_ms": 3.0,
        "plan_wait_ms": 1.0,
        "host_ms": {"plan": 1.0},
        "batching": "latency",
        "cp_sizes_RM": [[1, 1], [1, 1]],
        "segments_RM": [[1, 1], [1, 1]],
        "device_slowness_RP": [[1.0], [1.0]],
        "figures": FIGURES,
        "predicted": PREDICTED,
        "measured": {"times_2RPVM": TIMES_2RPVM, "schedule_ms": [[95.0], [90.0]]},
    } | changes


def step_record(iteration: int, /, **changes: Any) -> StepRecord:
    """A step as it is read: :func:`step_line` with changes to it and to its parts."""
    line = step_line(iteration)
    for name, value in changes.items():
        line[name] = line[name] | value if isinstance(value, dict) else value
    record = decode(json.dumps(line).encode(), STEP_LOG)
    assert isinstance(record, StepRecord)
    return record


def header_of(job: Job) -> RunHeader:
    """The header of a job."""
    return RunHeader(
        config={"batching": "latency"},
        cost_source="counted",
        job=job,
        global_batch_size=8,
        seq_length=256,
        iterations=None,
        grid=(1, 2, 4),
        counts={"documents": 9},
        sources=(),
        megatron_core="0.19.2",
        torch="2.15.0",
        device="cpu",
    )


HEADER = json.loads(encode(header_of(JOB)))
