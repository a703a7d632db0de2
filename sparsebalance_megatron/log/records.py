# SPDX-License-Identifier: Apache-2.0
"""Records of a run's logs: their keys, what makes them valid, and how they are made.

A log is a file of JSON lines. NaN and infinity are written as null: not measured.

Shape legend: 2 forward and backward, O rows of observations.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.json_file import what_is_wrong
from sparsebalance_megatron.learn.dealt_samples import DealtSamples, StepWindow
from sparsebalance_megatron.learn.measurement import (
    MeasuredTimes,
    Piece,
    RankPlace,
    Span,
    StepFigures,
    StepMeasurement,
    StepTimes,
)
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_plan import Expectation

LARGEST_COUNT = 2**40
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Number = float | None
"""None, null in the log, where nothing was measured."""
LONGEST_MS = 1e12
Milliseconds = Annotated[float, Meta(ge=0, le=LONGEST_MS)] | None
"""A measured or predicted time; a log with others is damaged."""
Duration = Annotated[float, Meta(ge=1e-3, le=LONGEST_MS)] | None
"""A time that others are divided by: no step takes less than a microsecond."""

Place = tuple[int, int]
"""(data-parallel rank, pipeline stage)."""

LOG_FORMAT: Literal[2] = 2
"""Changes with the keys; logs of another format are not read."""

_ROUNDING_MS = 1e-3
_MS_DIGITS = 4
_COVERAGE_DIGITS = 5


class DamagedLineError(ValueError):
    """A line that is no record of its log; says why."""


class Record(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line; ``lines_dropped`` lines before it could not be written."""

    lines_dropped: Count | UnsetType = UNSET


class Header(Record, frozen=True, kw_only=True):
    """First line of a file; ``lines_discarded`` older ones are gone."""

    log_format: Literal[2] = LOG_FORMAT
    lines_discarded: Count | UnsetType = UNSET


class LineStart(Struct):
    """Keys that tell lines apart, read without the others."""

    type: str = ""
    iteration: Count | None = None
    log_format: int = 1
    lines_discarded: Count = 0


class RunHeader(Header, frozen=True, kw_only=True, tag="run"):
    """Software, devices and settings of a run.

    ``cost_source``: where predicted times come from. ``seq_length``: tokens of the longest sample.
    ``iterations``: of the whole run, None where it ends otherwise. ``grid``: budgets, in blocks, at
    which coverage is observed. ``counts``: of the training samples. ``sources``: the data sets that
    a run mixes; none where there is but one.
    """

    config: dict[str, Any]
    job: Job
    cost_source: str
    global_batch_size: Count
    seq_length: Count
    iterations: Count | None
    grid: tuple[Count, ...]
    counts: dict[str, Count]
    sources: tuple[dict[str, Any], ...]
    megatron_core: str
    torch: str
    device: str
    world_size: Count | None = None

    def __post_init__(self) -> None:
        if not self.job.stage_layers:
            raise ValueError("job must have stages")


class StepRecord(Record, frozen=True, kw_only=True, tag="step"):
    """One step of all ranks: planned, predicted, measured. Times in ms.

    ``cp_sizes_RM``: by rank and position, how many neighbouring ranks share the micro-batch;
    ``segments_RM``: in how many segments it passes the pipeline. ``device_slowness_RP``: factors on
    the devices' predicted times. ``tflops``: operations of the model, in 1e12. ``window``: unset
    where samples keep their order of arrival.
    """

    iteration: Count
    iteration_ms: Duration
    lm_loss: Number
    tokens: Count
    padded_tokens: Count
    plan_ms: Milliseconds
    plan_wait_ms: Milliseconds
    host_ms: dict[str, Milliseconds]
    batching: str
    cp_sizes_RM: np.ndarray
    segments_RM: np.ndarray
    device_slowness_RP: np.ndarray
    figures: StepFigures
    predicted: Expectation
    measured: MeasuredTimes
    tflops: Number = None
    window: StepWindow | UnsetType = UNSET

    def __post_init__(self) -> None:
        shape = self.measured.times_2RPVM.shape
        if len(shape) != 5 or shape[0] != 2 or 0 in shape:
            raise ValueError("times must be [2][rank][stage][virtual stage][micro-batch]")
        for name, values in {
            "predicted.times_2RPVM": self.predicted.times_2RPVM,
            "measured.times_2RPVM": self.measured.times_2RPVM,
            "measured.own times": self.measured.own_2RPVM,
        }.items():
            if values.shape != shape:
                raise ValueError(f"{name} {values.shape} must be {shape}")
            if not ((values >= -_ROUNDING_MS) & (values <= LONGEST_MS) | np.isnan(values)).all():
                raise ValueError(f"{name} must be 0 to {LONGEST_MS:g}")

    @property
    def places(self) -> tuple[Place, ...]:
        ranks, stages = self.measured.times_2RPVM.shape[1:3]
        return tuple(np.ndindex(ranks, stages))

    @property
    def complete(self) -> bool:
        """Whether every micro-batch was measured, forward and backward."""
        return bool(np.isfinite(self.measured.own_2RPVM).all())


class RankHeader(Header, frozen=True, kw_only=True, tag="rank"):
    """Place of a rank; ``chunk_layers``: global, zero-based layers of each of its chunks."""

    world_rank: Count
    data_parallel_rank: Count
    pipeline_rank: Count
    tensor_parallel_rank: Count
    chunk_layers: tuple[tuple[int, ...], ...] = field(name="layers")
    host: str

    @property
    def place(self) -> Place:
        return self.data_parallel_rank, self.pipeline_rank


class RankStep(Record, frozen=True, kw_only=True, tag="step"):
    """One step of one rank; ``spans``: what was measured, in ms since ``start_unix_s``.

    ``micro_batches``: fields of :class:`.MicroBatchPlan` with the budgets of this rank's layers.
    Their ``samples`` are numbers in the data, ``coverage`` is of each the mean over the rank's
    layers; None on all ranks that share it but the first, and where a rank has no layers.
    """

    iteration: Count
    start_unix_s: Number = field(name="schedule_start_unix_s")
    schedule_ms: Milliseconds
    micro_batches: tuple[dict[str, Any], ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        for span in self.spans:
            if span.direction not in list(Direction):
                raise ValueError(f"spans holds {tuple(span)}, no forward or backward")
            if not 0 <= span.start_ms <= span.end_ms:
                raise ValueError(f"spans holds one from {span.start_ms} to {span.end_ms} ms")


def encode(record: Record) -> bytes:
    return _ENCODER.encode(record) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not go into a log")


def _array(kind: type, value: Any) -> np.ndarray:
    """Integers, or float64 with NaN for null. Raises ValueError for what is ragged or no number."""
    assert kind is np.ndarray
    try:
        found = np.array(value)
        return found if found.dtype == np.int64 else np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be an array of numbers") from None


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
STEP_LOG = msgspec.json.Decoder(RunHeader | StepRecord, dec_hook=_array)
LINE_START = msgspec.json.Decoder(LineStart)
RANK_LOG = msgspec.json.Decoder(RankHeader | RankStep, dec_hook=_array)


def decode[R](text: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    """The record of a line; DamagedLineError where it is cut off, or a key is not as it should."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = f"cut off or not JSON ({error})"
        if isinstance(error, msgspec.ValidationError):
            with suppress(ValueError, RecursionError):
                reason = what_is_wrong(error, msgspec.json.decode(text))
    raise DamagedLineError(reason)


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """Facts about a step at its end; nothing in it changes afterwards.

    ``iteration_ms`` is None in the first step of a process. Of the rank that writes alone are
    ``host_ms`` (:class:`.timing.HostTime`), ``times``, and the coverage that it observed
    (:meth:`.step_reducer.StepReducer.reduce`): ``pieces`` say whose, ``executed_O`` how much.
    """

    iteration: int
    iteration_ms: float | None
    planned: PlannedStep
    measured: StepMeasurement
    figures: StepFigures
    padded_tokens: int
    host_ms: Mapping[str, float]
    times: StepTimes
    pieces: Sequence[Piece]
    executed_O: np.ndarray


def step_record(
    step: FinishedStep, dealt: DealtSamples | None = None, tflops: float | None = None
) -> StepRecord:
    planned, plan, measured = step.planned, step.planned.plan, step.measured
    by_rank = [plan.for_rank(rank).micro_batches for rank in range(plan.data_parallel_size)]
    return StepRecord(
        iteration=step.iteration,
        iteration_ms=step.iteration_ms,
        lm_loss=measured.lm_loss,
        tokens=measured.tokens,
        padded_tokens=step.padded_tokens,
        plan_ms=planned.plan_ms,
        plan_wait_ms=planned.wait_ms,
        host_ms=dict(step.host_ms),
        batching=plan.batching,
        cp_sizes_RM=np.array([[each.cp_size for each in own] for own in by_rank]),
        segments_RM=np.array([[each.segments for each in own] for own in by_rank]),
        device_slowness_RP=np.broadcast_to(planned.scales.slowness_RP, measured.schedule_ms.shape),
        figures=step.figures,
        predicted=plan.expectation,
        measured=MeasuredTimes(
            times_2RPVM=measured.times_2RPVM,
            schedule_ms=measured.schedule_ms,
            waiting_2RPVM=measured.waiting_2RPVM,
        ),
        tflops=tflops,
        window=UNSET if dealt is None else dealt.step_window(plan.step),
    )


def rank_header(place: RankPlace, job: Job, host: str) -> RankHeader:
    ranks = ("world_rank", "data_parallel_rank", "pipeline_rank", "tensor_parallel_rank")
    return RankHeader(
        **{name: getattr(place, name) for name in ranks},
        chunk_layers=job.stage_layers[place.pipeline_rank],
        host=host,
    )


def rank_step(step: FinishedStep, place: RankPlace, job: Job) -> RankStep:
    planned, times = step.planned, step.times
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    ends = np.cumsum([piece.samples for piece in step.pieces], dtype=np.int64)
    for piece, rows in zip(step.pieces, np.split(step.executed_O, ends), strict=False):
        observed.setdefault(piece.position, []).append(rows)
    micro_batches = []
    for plan in planned.plan.for_rank(place.data_parallel_rank).micro_batches:
        coverage = None
        if of_layers := observed.get(plan.position):
            coverage = tuple(np.mean(of_layers, axis=0).round(_COVERAGE_DIGITS).tolist())
        own = {
            "samples": tuple(planned.samples[list(plan.samples)].tolist()),
            "budgets_LS": plan.budgets_LS[layers],
            "dense_documents_L": plan.dense_documents_L[layers],
            "coverage": coverage,
        }
        micro_batches.append(vars(plan) | own)
    return RankStep(
        iteration=step.iteration,
        start_unix_s=times.start_unix_s,
        schedule_ms=times.schedule_ms,
        micro_batches=tuple(micro_batches),
        spans=tuple(
            span._replace(
                start_ms=round(span.start_ms, _MS_DIGITS), end_ms=round(span.end_ms, _MS_DIGITS)
            )
            for span in times.spans
        ),
    )
