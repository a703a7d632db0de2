# SPDX-License-Identifier: Apache-2.0
"""Every record that a run's logs hold: its keys, how it is written, and what makes it valid.

A log is a file of JSON lines. NaN and infinity are written as null: not measured.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
S samples of a micro-batch, U length buckets, K budgets of the grid, 2 forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field

from sparsebalance_megatron.json_file import what_is_wrong
from sparsebalance_megatron.learn.measurement import DIRECTIONS, Span
from sparsebalance_megatron.plan.context_groups import is_power_of_two, unshared
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.plan.pipeline.orders import MegatronSchedule

Count = Annotated[int, Meta(ge=0, le=2**40)]
Layer = Annotated[int, Meta(ge=0, le=10_000)]
Length = Annotated[int, Meta(ge=1, le=2**40)]
Number = float | None
"""None, null in the log, where nothing was measured."""
LONGEST_MS = 1e12
Milliseconds = Annotated[float, Meta(ge=0, le=LONGEST_MS)] | None
"""A measured or predicted time; a log with others is damaged."""
Duration = Annotated[float, Meta(ge=1e-3, le=LONGEST_MS)] | None
"""A time that others are divided by: no step takes less than a microsecond."""
Share = Annotated[float, Meta(ge=-1e-3, le=1.001)] | None
"""A coverage, 0 to 1 but for rounding."""

Place = tuple[int, int]
"""(data-parallel rank, pipeline stage)."""

SIDES = ("predicted", "measured")
"""What is known of a step's times."""

_MAX_BLOCKS = 2**31


class DamagedLineError(ValueError):
    """A line that is no record of its log; says why."""


class Record(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line; ``lines_dropped`` lines before it could not be written."""

    lines_dropped: Count | UnsetType = UNSET


class Header(Record, frozen=True, kw_only=True):
    """First line of a file; ``lines_discarded`` older ones are gone, for space."""

    lines_discarded: Count | UnsetType = UNSET


class DataSource(Struct, frozen=True, kw_only=True):
    """A data set that a run mixes with others."""

    prefix: str
    weight: float
    counts: dict[str, Count]


class RunHeader(Header, frozen=True, kw_only=True, tag="run"):
    """Software, devices and settings of a run.

    ``config``: the plugin's settings by name. ``cost_source``: where predicted times come from.
    ``seq_length``: tokens of the longest sample. ``grid``: budgets, in blocks, at which coverage is
    observed. ``counts``: of the training samples. ``stage_layers``: global, zero-based layers by
    pipeline stage and chunk. ``sources`` is there only where a run mixes data sets,
    ``micro_batch_group_size`` only where it is not Megatron's default, and ``lockstep_ranks`` only
    where several ranks begin every layer together.
    """

    config: dict[str, Any]
    cost_source: str
    data_parallel_size: Count
    pipeline_stages: Count
    virtual_stages: Count
    micro_batches: Count
    layers: Count
    global_batch_size: Count
    seq_length: Count
    grid: tuple[Count, ...]
    counts: dict[str, Count]
    stage_layers: tuple[tuple[tuple[Layer, ...], ...], ...]
    schedule: str
    megatron_core: str
    torch: str
    device: str
    micro_batch_group_size: Count | UnsetType = UNSET
    sources: tuple[DataSource, ...] | UnsetType = UNSET
    lockstep_ranks: Length | UnsetType = UNSET

    @property
    def pipeline_schedule(self) -> MegatronSchedule:
        """The schedule that the run planned with."""
        return MegatronSchedule(self.micro_batch_group_size or None)


class Predicted(Struct, frozen=True, kw_only=True):
    """Predictions of a step by its plan; imbalances are max/mean.

    ``segment_ms``: by rank, [2, P, segments of all its micro-batches]; only where stages ran
    segments.
    """

    makespan_ms: Milliseconds
    lower_bound_ms: Milliseconds
    rank_makespan_ms: tuple[Milliseconds, ...]
    forward_ms: np.ndarray
    backward_ms: np.ndarray
    rank_busy_ms: tuple[Milliseconds, ...]
    imbalance_micro_batches: Number
    imbalance_rank_sums: Number
    imbalance_makespans: Number
    work_ratio: Number
    samples_cut: Count
    samples_raised: Count
    samples_clamped: Count
    device_slowness: tuple[tuple[Number, ...], ...] | None
    segment_ms: tuple[np.ndarray, ...] | UnsetType = UNSET


class Measured(Struct, frozen=True, kw_only=True):
    """Measured times of a step; ``rank_busy_ms``: computing time of each rank's busiest stage.

    ``own_forward_ms`` and ``own_backward_ms`` are there only where ranks wait for one another in
    every layer: ``forward_ms`` and ``backward_ms`` less that waiting. Busy times and imbalances are
    of own times.
    """

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    own_forward_ms: np.ndarray | UnsetType = UNSET
    own_backward_ms: np.ndarray | UnsetType = UNSET
    rank_busy_ms: tuple[Milliseconds, ...]
    schedule_ms: tuple[tuple[Milliseconds, ...], ...]
    imbalance_rank_sums: Number
    imbalance_micro_batches: Number

    def __post_init__(self) -> None:
        if self.forward_ms.ndim != 4 or not self.forward_ms.size:
            raise ValueError("forward_ms must be [rank][stage][virtual stage][micro-batch]")
        for name in ("own_forward_ms", "own_backward_ms"):
            own = getattr(self, name)
            if own is not UNSET and own.shape != self.forward_ms.shape:
                raise ValueError(
                    f"{name} {own.shape} must be {self.forward_ms.shape} as forward_ms"
                )
            if own is not UNSET:
                _check_ms(name, own)


class StepCoverage(Struct, frozen=True, kw_only=True):
    """Executed coverage over samples and layers; ``base_mean``: what base budgets had given.

    ``lost_by_token``: what base budgets had given more, where every token counts alike.
    """

    mean: Share
    min: Share
    base_mean: Share
    unobserved: Count
    lost_by_token: Annotated[float, Meta(ge=-1.001, le=1.001)] | None = None


class Recompute(Struct, frozen=True, kw_only=True):
    """Layers that backward recomputed; see :class:`.measurement.RecomputeTotals`."""

    kept: Count
    again: Count
    otherwise: Count


class StepRecord(Record, frozen=True, kw_only=True, tag="step"):
    """One step of all ranks: planned, expected, measured. Times in ms.

    ``cp_sizes``: by rank and position, how many neighbouring ranks shared the micro-batch; None
    where none was shared. ``segments``: by rank, segments of each of its micro-batches; only where
    stages ran segments.
    """

    iteration: Count
    iteration_ms: Duration
    lm_loss: Number
    plan_ms: Milliseconds
    host_ms: dict[str, Milliseconds]
    plan_wait_ms: Milliseconds
    batching: str
    cp_sizes: tuple[tuple[Count, ...], ...] | None
    predicted: Predicted
    measured: Measured
    coverage: StepCoverage
    tokens: Count
    padded_tokens: Count
    recompute: Recompute
    segments: tuple[tuple[Count, ...], ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        for side in (self.predicted, self.measured):
            for name in DIRECTIONS:
                times = getattr(side, f"{name}_ms")
                if times.shape != self.shape:
                    raise ValueError(
                        f"{name}_ms {times.shape} must be {self.shape} as measured forward"
                    )
                _check_ms(f"{name}_ms", times)
            if len(side.rank_busy_ms) != self.shape[0]:
                raise ValueError(
                    f"rank_busy_ms of {len(side.rank_busy_ms)} ranks, not {self.shape[0]}"
                )
        if self.cp_sizes is not None and not _are_groups(
            self.cp_sizes, self.shape[0], self.shape[3]
        ):
            raise ValueError(
                f"cp_sizes {str(self.cp_sizes)[:60]} are no groups of neighbouring ranks"
            )
        if self.segments and (
            len(self.segments) != self.shape[0]
            or self.shape[2] != 1
            or not all(len(of_rank) == self.shape[3] and all(of_rank) for of_rank in self.segments)
        ):
            raise ValueError(
                f"segments {str(self.segments)[:60]} must be at least 1 of every micro-batch"
            )
        expected = [(2, self.shape[1], sum(of_rank)) for of_rank in self.segments or ()]
        found = [of_rank.shape for of_rank in self.predicted.segment_ms or ()]
        if found not in ([], expected):
            raise ValueError(f"segment_ms {str(found)[:60]} must be {str(expected)[:60]}")

    @property
    def shape(self) -> tuple[int, ...]:
        """R, P, V and M."""
        return self.measured.forward_ms.shape

    @property
    def places(self) -> tuple[Place, ...]:
        """All stages of all data-parallel ranks."""
        return tuple(np.ndindex(self.shape[:2]))

    @property
    def cp_sizes_RM(self) -> np.ndarray:
        if self.cp_sizes is None:
            return unshared(self.shape[0], self.shape[3])
        return np.array(self.cp_sizes)

    def times_2RPVM(self, side: str) -> np.ndarray:
        """Own ms of every micro-batch, of one of :data:`SIDES`; NaN where nothing was measured."""
        forward, backward = self.measured.own_forward_ms, self.measured.own_backward_ms
        if side == "measured" and forward is not UNSET and backward is not UNSET:
            return np.stack([forward, backward])
        return self.passed_2RPVM(side)

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait for one another in layers, so that own times are logged."""
        return self.measured.own_forward_ms is not UNSET

    def passed_2RPVM(self, side: str) -> np.ndarray:
        """What passed from the begin to the end of every micro-batch: with waiting in layers,
        where it was measured."""
        times = getattr(self, side)
        return np.stack([times.forward_ms, times.backward_ms])

    @property
    def complete(self) -> bool:
        """Whether every micro-batch was measured, forward and backward."""
        return bool(np.isfinite(self.times_2RPVM("measured")).all())

    @property
    def compute_ms(self) -> float | None:
        """Mean over all stages of all ranks of their computing time."""
        busy_ms = float(stage_busy_ms(self.times_2RPVM("measured")).mean())
        return busy_ms if math.isfinite(busy_ms) else None

    @property
    def schedule_ms(self) -> float | None:
        """From the schedule's start to the last backward of the slowest rank."""
        ends_ms = _all_or_none([ms for stages in self.measured.schedule_ms for ms in stages])
        return max(ends_ms) if ends_ms else None

    @property
    def measured_rank_ms(self) -> tuple[float, ...] | None:
        """Computing time of each rank's busiest stage; None where one is missing."""
        return _all_or_none(self.measured.rank_busy_ms)

    @property
    def predicted_rank_ms(self) -> tuple[float, ...] | None:
        """Predicted computing time of each rank's busiest stage; None where one is unknown."""
        return _all_or_none(self.predicted.rank_busy_ms)


class CoverageRecord(Record, frozen=True, kw_only=True, tag="coverage"):
    """Coverage against budget as it was known after ``iteration``.

    ``grid``: budgets in blocks. ``bucket_blocks``: the largest number of blocks of a document in
    each length bucket. ``curves``: by layer and bucket; None where nothing was observed.
    """

    iteration: Count
    grid: tuple[Count, ...]
    bucket_blocks: tuple[Count, ...]
    curves: tuple[tuple[tuple[Number, ...] | None, ...], ...]

    def __post_init__(self) -> None:
        buckets, budgets = len(self.bucket_blocks), len(self.grid)
        if not self.curves or any(
            len(layer) != buckets or any(curve and len(curve) != budgets for curve in layer)
            for layer in self.curves
        ):
            raise ValueError(f"curves must have {buckets} buckets and {budgets} budgets per layer")

    @property
    def curves_LUK(self) -> np.ndarray:
        """The curves; NaN where nothing was observed."""
        unknown = (None,) * len(self.grid)
        rows = [[curve or unknown for curve in layer] for layer in self.curves]
        return np.array(rows, dtype=np.float64)


class RankHeader(Header, frozen=True, kw_only=True, tag="rank"):
    """Place of a rank; ``chunk_layers``: global, zero-based layers of each of its chunks."""

    world_rank: Count
    data_parallel_rank: Count
    pipeline_rank: Count
    tensor_parallel_rank: Count
    chunk_layers: tuple[tuple[Layer, ...], ...] = field(name="layers")
    host: str

    @property
    def place(self) -> Place:
        return self.data_parallel_rank, self.pipeline_rank

    @property
    def layers(self) -> tuple[int, ...]:
        """Those of all chunks, in the order of the rows of budgets."""
        return tuple(layer for chunk in self.chunk_layers for layer in chunk)


class RankMicroBatch(Struct, frozen=True, kw_only=True):
    """A micro-batch as one rank ran it: budgets in blocks, coverage the mean over its layers.

    It lay on ``cp_size`` neighbouring ranks, of which this was number ``member``; coverage is None
    on all of them but member 0, and where the rank has no layers. ``samples``: their numbers in the
    data.
    """

    position: Count
    cp_size: Length
    member: Count
    samples: tuple[Count, ...]
    lengths_tokens: Annotated[tuple[Length, ...], Meta(min_length=1)]
    budgets: np.ndarray
    coverage: tuple[Share, ...] | None

    def __post_init__(self) -> None:
        budgets = self.budgets
        if budgets.size and budgets.shape != (len(budgets), len(self.lengths_tokens)):
            raise ValueError(f"budgets {budgets.shape} must be [layer][sample]")
        if not ((budgets >= 1) & (budgets <= _MAX_BLOCKS)).all():
            raise ValueError("budgets must be numbers of blocks, at least 1")

    @property
    def tokens(self) -> int:
        return sum(self.lengths_tokens)

    @property
    def budgets_LS(self) -> np.ndarray:
        return self.budgets.reshape(-1, len(self.lengths_tokens))


class RankStep(Record, frozen=True, kw_only=True, tag="step"):
    """One step of one rank; ``spans``: what was measured, in ms since ``start_unix_s``."""

    iteration: Count
    start_unix_s: Number = field(name="schedule_start_unix_s")
    schedule_ms: Milliseconds
    micro_batches: tuple[RankMicroBatch, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        for span in self.spans:
            if span.direction not in DIRECTIONS or min(span[1:3] + span[5:]) < 0:
                raise ValueError(f"spans holds {tuple(span)}, no forward or backward")
            if not 0 <= span.start_ms <= span.end_ms:
                raise ValueError(f"spans holds one from {span.start_ms} to {span.end_ms} ms")


def encode(record: Record) -> bytes:
    """One line of a log."""
    return _ENCODER.encode(record) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not go into a log")


def _array(kind: type, value: Any) -> np.ndarray:
    """float64; NaN for null. Raises ValueError for what is ragged or not of numbers."""
    assert kind is np.ndarray
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be an array of numbers") from None


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
STEP_LOG = msgspec.json.Decoder(RunHeader | StepRecord | CoverageRecord, dec_hook=_array)
"""Decodes lines of the step log."""
RANK_LOG = msgspec.json.Decoder(RankHeader | RankStep, dec_hook=_array)
"""Decodes lines of a rank's log."""


def decode[R](text: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    """The record of a line.

    Args:
        decoder: :data:`STEP_LOG`, :data:`RANK_LOG` or the like.

    Raises:
        DamagedLineError: the line is cut off or not JSON, or a value is missing or not what it
            should be; names the key.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        reason = what_is_wrong(error, _anything(text))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"cut off or not JSON ({error})"
    except RecursionError:
        reason = "cut off or not JSON (nested too deep)"
    raise DamagedLineError(reason)


def _anything(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _check_ms(name: str, times: np.ndarray) -> None:
    if ((times < 0) | (times > LONGEST_MS)).any():
        raise ValueError(f"{name} must be 0 to {LONGEST_MS:g} ms")


def _all_or_none(values: Sequence[Number]) -> tuple[float, ...] | None:
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(values) else None


def _are_groups(cp_sizes: tuple[tuple[int, ...], ...], ranks: int, positions: int) -> bool:
    """Whether the ranks fall into aligned groups of powers of two at every position."""
    if len(cp_sizes) != ranks or any(len(of_rank) != positions for of_rank in cp_sizes):
        return False
    for sizes in zip(*cp_sizes, strict=True):
        rank = 0
        while rank < ranks:
            size = sizes[rank]
            members = sizes[rank : rank + size]
            if not is_power_of_two(size) or rank % size or members != (size,) * size:
                return False
            rank += size
    return True
