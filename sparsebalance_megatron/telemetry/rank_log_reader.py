# SPDX-License-Identifier: Apache-2.0
"""Reads what every rank wrote of its own micro-batches: ``ranks/rank-*.jsonl``.

Tensor-parallel ranks do the same work; the first of each group speaks for it. Only the iterations
asked for are parsed; files are read line by line.

Shape legend: L layers of a rank, S samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    array,
    finite,
    index,
    lines,
    log_files,
    optional_field,
    optional_number,
    whole,
)
from sparsebalance_megatron.telemetry.jsonl import field as value_of
from sparsebalance_megatron.telemetry.run_log import LostLines

RANKS_FOLDER = "ranks"
_MOST_LAYERS = 10_000
_MOST_BLOCKS = 2**31

Place = tuple[int, int]
"""(data-parallel rank, pipeline stage)."""


@dataclass(frozen=True, kw_only=True)
class RankHeader:
    """Where a rank stands; ``layers``: global indices, in the order of the rows of its budgets."""

    world_rank: int
    place: Place
    tensor_parallel_rank: int
    layers: tuple[int, ...]
    host: str


@dataclass(frozen=True, kw_only=True)
class RankMicroBatch:
    """A micro-batch as one rank ran it: budgets in blocks, coverage the mean over its layers."""

    position: int
    lengths_tokens: tuple[int, ...]
    budgets_LS: np.ndarray
    coverage_S: tuple[float | None, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths_tokens)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A forward or a backward, in ms since its rank's schedule began."""

    kind: str
    chunk: int
    position: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank. ``unmeasured``: spans without a time."""

    start_unix_s: float | None
    micro_batches: tuple[RankMicroBatch, ...]
    spans: tuple[Span, ...]
    unmeasured: int


@dataclass(frozen=True, kw_only=True)
class RankLogs:
    """What the ranks wrote; ``steps[iteration][place]``."""

    headers: Mapping[Place, RankHeader] = field(default_factory=dict)
    steps: Mapping[int, Mapping[Place, RankStep]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return len({header.host for header in self.headers.values()})


def rank_files(directory: Path) -> tuple[Path, ...]:
    """The newest file of every rank that has one."""
    folder = directory / RANKS_FOLDER
    names = {path.name.replace(".1.jsonl", ".jsonl") for path in folder.glob("rank-*.jsonl")}
    return tuple(folder / name for name in sorted(names))


def rank_iterations(directory: Path) -> tuple[int, ...]:
    """Iterations that the first rank wrote of; for runs without a step log."""
    for path in rank_files(directory)[:1]:
        try:
            found = {line.iteration for each in log_files(path) for line in lines(each)}
        except OSError:
            return ()
        return tuple(sorted(iteration for iteration in found if iteration is not None))
    return ()


def read_rank_logs(directory: Path, iterations: Collection[int]) -> RankLogs:
    """Read the given iterations of every rank; of one that is there twice the later line counts."""
    wanted = frozenset(iterations)
    headers: dict[Place, RankHeader] = {}
    steps: dict[int, dict[Place, RankStep]] = {}
    problems: list[str] = []
    for path in rank_files(directory):
        reader = _Reader(path, wanted)
        for each in log_files(path):
            if reader.repeats_another:
                break
            reader.read(each)
        problems += reader.finish()
        if reader.header is None or reader.repeats_another:
            continue
        headers[reader.header.place] = reader.header
        for iteration, step in reader.steps.items():
            steps.setdefault(iteration, {})[reader.header.place] = step
    return RankLogs(headers=headers, steps=steps, problems=tuple(problems))


def missing_places(ranks: RankLogs, places: Iterable[Place]) -> list[Place]:
    """Places of the job that no file speaks of."""
    return [place for place in places if place not in ranks.headers]


class _Reader:
    """Takes in one rank's lines in the order they were written."""

    def __init__(self, path: Path, wanted: frozenset[int]) -> None:
        self.header: RankHeader | None = None
        self.steps: dict[int, RankStep] = {}
        self._path = path
        self._wanted = wanted
        self._problems: list[str] = []
        self._losses = LostLines()
        self._headless = 0

    @property
    def repeats_another(self) -> bool:
        """Whether another tensor-parallel rank says the same."""
        return self.header is not None and self.header.tensor_parallel_rank != 0

    def read(self, path: Path) -> None:
        try:
            for line in lines(path):
                iteration = line.iteration
                whole_line = line.text.endswith(b"}\n")
                if whole_line and iteration is not None and iteration not in self._wanted:
                    continue
                try:
                    self._take(line.parse(("rank", "step")))
                except BadLineError as error:
                    self._problems.append(line.problem(error))
                if self.repeats_another:
                    return
        except OSError as error:
            self._problems.append(f"{path}: {error.strerror}; this rank is left out")

    def _take(self, record: Mapping[str, Any]) -> None:
        self._losses.take(record)
        if record["type"] == "rank":
            self.header = _header(record)
        elif self.header is None:
            self._headless += 1
        else:
            iteration = whole(record, "iteration")
            if iteration in self._wanted:
                self.steps[iteration] = _step(record, len(self.header.layers))

    def finish(self) -> list[str]:
        if self.header is None:
            self._problems.append(f"{self._path}: no header line; this rank is left out")
        elif self._headless:
            self._problems.append(
                f"{self._path}: {self._headless} steps before the first header; left out"
            )
        return [*self._problems, *self._losses.remarks(self._path)]


def _header(record: Mapping[str, Any]) -> RankHeader:
    chunks = value_of(record, "layers")
    try:
        layers = tuple(index(layer, "layers") for chunk in chunks for layer in chunk)
    except TypeError:
        raise BadLineError(f"layers is {chunks!r}, not a list of layers per chunk") from None
    if max(layers, default=0) > _MOST_LAYERS:
        raise BadLineError(f"layers holds {max(layers)}")
    return RankHeader(
        world_rank=whole(record, "world_rank"),
        place=(whole(record, "data_parallel_rank"), whole(record, "pipeline_rank")),
        tensor_parallel_rank=whole(record, "tensor_parallel_rank"),
        layers=layers,
        host=str(optional_field(record, "host")),
    )


def _step(record: Mapping[str, Any], layers: int) -> RankStep:
    spans = optional_field(record, "spans") or []
    micro_batches = value_of(record, "micro_batches")
    if not isinstance(spans, list) or not isinstance(micro_batches, list):
        raise BadLineError("micro_batches or spans is not a list")
    measured = [_span(values) for values in spans]
    return RankStep(
        start_unix_s=optional_number(record, "schedule_start_unix_s"),
        micro_batches=tuple(_micro_batch(each, layers) for each in micro_batches),
        spans=tuple(span for span in measured if span is not None),
        unmeasured=measured.count(None),
    )


def _span(values: Any) -> Span | None:
    """None where a time is null."""
    match values:
        case ["forward" | "backward" as kind, chunk, position, start, end]:
            chunk, position = index(chunk, "spans"), index(position, "spans")
            start_ms, end_ms = finite(start, "spans"), finite(end, "spans")
        case _:
            raise BadLineError(f"spans holds {str(values)[:60]}")
    if start_ms is None or end_ms is None:
        return None
    if not 0 <= start_ms <= end_ms:
        raise BadLineError(f"spans holds one from {start_ms} to {end_ms} ms")
    return Span(kind=kind, chunk=chunk, position=position, start_ms=start_ms, end_ms=end_ms)


def _micro_batch(record: Any, layers: int) -> RankMicroBatch:
    lengths_tokens = value_of(record, "lengths_tokens")
    if not isinstance(lengths_tokens, list) or not lengths_tokens:
        raise BadLineError("lengths_tokens is not a list of lengths")
    lengths = tuple(index(length, "lengths_tokens") for length in lengths_tokens)
    if 0 in lengths:
        raise BadLineError("lengths_tokens holds 0")
    budgets_LS = array(value_of(record, "budgets"), "budgets")
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
    )
