# SPDX-License-Identifier: Apache-2.0
"""Lines of a rank's log, written and read: what it was told to compute, when, with which coverage.

Shape legend: L layers of this rank, S samples of a micro-batch, O rows of observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance_megatron.learn.measurement import DIRECTIONS, Piece, RankPlace, Span, StepTimes
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    array,
    field,
    finite,
    index,
    optional_field,
    optional_number,
    whole,
)
from sparsebalance_megatron.telemetry.step_record import STEP

RANK = "rank"
"""Type of the header."""

_MS_DIGITS = 4
_COVERAGE_DIGITS = 5
_MOST_LAYERS = 10_000
_MOST_BLOCKS = 2**31

Place = tuple[int, int]
"""(data-parallel rank, pipeline stage)."""


@dataclass(frozen=True, kw_only=True)
class RankHeader:
    """Where a rank stands; ``layers``: global indices, in the order of the rows of its budgets.

    ``host`` is empty where the log does not name it.
    """

    world_rank: int
    place: Place
    tensor_parallel_rank: int
    layers: tuple[int, ...]
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class RankMicroBatch:
    """A micro-batch as one rank ran it: budgets in blocks, coverage the mean over its layers.

    The row lay on ``width`` neighbouring ranks, of which this was number ``member``; member 0
    speaks for all of coverage, and the others have none.
    """

    position: int
    lengths_tokens: tuple[int, ...]
    budgets_LS: np.ndarray
    coverage_S: tuple[float | None, ...]
    width: int = 1
    member: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths_tokens)


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank. ``unmeasured``: spans without a time."""

    start_unix_s: float | None
    micro_batches: tuple[RankMicroBatch, ...]
    spans: tuple[Span, ...]
    unmeasured: int


def rank_header(place: RankPlace, job: Job, host: str) -> dict[str, Any]:
    """The first line; ``layers`` are global and zero-based, one list per chunk."""
    return {
        "type": RANK,
        "world_rank": place.world_rank,
        "data_parallel_rank": place.data_parallel_rank,
        "pipeline_rank": place.pipeline_rank,
        "tensor_parallel_rank": place.tensor_parallel_rank,
        "layers": [list(chunk) for chunk in job.stage_layers[place.pipeline_rank]],
        "host": host,
    }


def read_rank_header(record: Mapping[str, Any]) -> RankHeader:
    """What :func:`rank_header` wrote; raises :class:`BadLineError` at a wrong or missing value."""
    chunks = field(record, "layers")
    try:
        layers = tuple(index(layer, "layers") for chunk in chunks for layer in chunk)
    except TypeError:
        raise BadLineError(f"layers is {chunks!r}, not a list of layers per chunk") from None
    if max(layers, default=0) > _MOST_LAYERS:
        raise BadLineError(f"layers holds {max(layers)}")
    host = optional_field(record, "host")
    return RankHeader(
        world_rank=whole(record, "world_rank"),
        place=(whole(record, "data_parallel_rank"), whole(record, "pipeline_rank")),
        tensor_parallel_rank=whole(record, "tensor_parallel_rank"),
        layers=layers,
        host=host if isinstance(host, str) else "",
    )


def rank_record(
    *,
    iteration: int,
    planned: PlannedStep,
    place: RankPlace,
    job: Job,
    times: StepTimes,
    pieces: Sequence[Piece],
    executed_and_grown_O2: np.ndarray,
) -> dict[str, Any]:
    """One step of this rank. Times in ms; budgets are as planned, coverage as executed.

    Args:
        pieces, executed_and_grown_O2: see :class:`.observed_coverage.ObservedCoverage`.
    """
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    first = 0
    for piece in pieces:
        rows = executed_and_grown_O2[first : first + piece.samples]
        observed.setdefault(piece.position, []).append(rows)
        first += piece.samples
    micro_batches = planned.plan.for_rank(place.data_parallel_rank).micro_batches
    return {
        "type": STEP,
        "iteration": iteration,
        "schedule_start_unix_s": times.start_unix_s,
        "schedule_ms": times.schedule_ms,
        "micro_batches": [
            {
                "position": position,
                "width": micro_batch.width,
                "member": place.data_parallel_rank - micro_batch.rank,
                **_micro_batch(micro_batch, planned.samples, layers, observed.get(position)),
            }
            for position, micro_batch in enumerate(micro_batches)
        ],
        "spans": [
            (*span[:3], round(span.start_ms, _MS_DIGITS), round(span.end_ms, _MS_DIGITS))
            for span in times.spans
        ],
    }


def _micro_batch(
    plan: MicroBatchPlan,
    samples: np.ndarray,
    layers: list[int],
    observed: list[np.ndarray] | None,
) -> dict[str, Any]:
    """``observed``: [S, 2] of every layer; coverage is null where this rank has no layers, or is
    not the first of those that share the row."""
    coverage, guarded = None, 0
    if observed is not None:
        observed_LS2 = np.stack(observed)
        coverage = np.round(observed_LS2[..., 0].mean(axis=0), _COVERAGE_DIGITS).tolist()
        guarded = int(observed_LS2[..., 1].sum())
    return {
        "samples": samples[list(plan.samples)].tolist(),
        "lengths_tokens": list(plan.lengths_tokens),
        "budgets": plan.budgets_LS[layers].tolist(),
        "coverage": coverage,
        "guarded": guarded,
    }


def read_rank_step(record: Mapping[str, Any], layers: int) -> RankStep:
    """What :func:`rank_record` wrote; raises :class:`BadLineError` at a wrong or missing value.

    Args:
        layers: of the rank, by its header.
    """
    spans = optional_field(record, "spans") or []
    micro_batches = field(record, "micro_batches")
    if not isinstance(spans, list) or not isinstance(micro_batches, list):
        raise BadLineError("micro_batches or spans is not a list")
    measured = [_read_span(values) for values in spans]
    return RankStep(
        start_unix_s=optional_number(record, "schedule_start_unix_s"),
        micro_batches=tuple(_read_micro_batch(each, layers) for each in micro_batches),
        spans=tuple(span for span in measured if span is not None),
        unmeasured=measured.count(None),
    )


def _read_span(values: Any) -> Span | None:
    """None where a time is null."""
    match values:
        case [str(direction), chunk, position, start, end] if direction in DIRECTIONS:
            chunk, position = index(chunk, "spans"), index(position, "spans")
            start_ms, end_ms = finite(start, "spans"), finite(end, "spans")
        case _:
            raise BadLineError(f"spans holds {str(values)[:60]}")
    if start_ms is None or end_ms is None:
        return None
    if not 0 <= start_ms <= end_ms:
        raise BadLineError(f"spans holds one from {start_ms} to {end_ms} ms")
    return Span(direction, chunk, position, start_ms, end_ms)


def _read_micro_batch(record: Any, layers: int) -> RankMicroBatch:
    lengths_tokens = field(record, "lengths_tokens")
    if not isinstance(lengths_tokens, list) or not lengths_tokens:
        raise BadLineError("lengths_tokens is not a list of lengths")
    lengths = tuple(index(length, "lengths_tokens") for length in lengths_tokens)
    if 0 in lengths:
        raise BadLineError("lengths_tokens holds 0")
    budgets_LS = array(field(record, "budgets"), "budgets")
    if not layers:
        budgets_LS = np.zeros((0, len(lengths)))
    if budgets_LS.shape != (layers, len(lengths)):
        raise BadLineError(
            f"budgets {budgets_LS.shape} must be [layer][sample], here {(layers, len(lengths))}"
        )
    if not ((budgets_LS >= 1) & (budgets_LS <= _MOST_BLOCKS)).all():
        raise BadLineError("budgets holds null, or is no number of blocks")
    coverage = optional_field(record, "coverage")
    return RankMicroBatch(
        position=whole(record, "position"),
        lengths_tokens=lengths,
        budgets_LS=budgets_LS,
        coverage_S=tuple(finite(value, "coverage") for value in coverage)
        if isinstance(coverage, list)
        else (),
        width=whole(record, "width") if "width" in record else 1,
        member=whole(record, "member") if "member" in record else 0,
    )
