# SPDX-License-Identifier: Apache-2.0
"""Reads the step log of a run: a header line, then one JSON line per step.

What a damaged file still says is kept; every line that had to be left out is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.telemetry.jsonl import (
    BadLineError,
    Line,
    array,
    field,
    finite,
    lines,
    log_files,
    number,
    optional_number,
    whole,
)

STEP_LOG_NAME = "steps.jsonl"


class RunLogError(ValueError):
    """A run left no usable step log."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step as logged. Times in ms; None where nothing was measured.

    ``measured_rank_ms`` and ``predicted_rank_ms`` hold, per data-parallel rank, the computing time
    of its busiest pipeline stage. ``lower_bound_ms`` and ``work_ratio`` are the planner's, and
    ``coverage_base`` is the mean coverage that base budgets had given.
    ``micro_batch_ms`` is measured: [rank][stage][micro-batch], forward and backward together.
    """

    iteration: int
    iteration_ms: float | None
    lm_loss: float | None
    tokens: int
    coverage: float | None
    measured_rank_ms: tuple[float, ...] | None
    predicted_rank_ms: tuple[float, ...] | None
    lower_bound_ms: float | None
    work_ratio: float | None
    micro_batch_ms: tuple[tuple[tuple[float, ...], ...], ...] | None
    coverage_base: float | None = None
    predicted_makespan_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class CoverageRecord:
    """Coverage against budget as it was known after ``iteration``.

    ``grid``: K budgets in blocks. ``bucket_blocks``: the largest number of blocks of a document in
    each of U length buckets. ``curves_LUK``: NaN where nothing was observed.
    """

    iteration: int
    grid: tuple[int, ...]
    bucket_blocks: tuple[int, ...]
    curves_LUK: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run's header and steps by rising iteration; ``problems`` says what the file lacks.

    ``coverage``: the last record of coverage curves, None where there is none.
    """

    directory: Path
    header: Mapping[str, Any]
    steps: tuple[Step, ...]
    problems: tuple[str, ...]
    coverage: CoverageRecord | None = None


def read_run_log(directory: str | Path) -> RunLog:
    """Read ``DIRECTORY/steps.jsonl``, and ``steps.1.jsonl`` before it where the log outgrew a file.

    A resumed run appends to its log: of an iteration that is there twice the later line counts.

    Raises:
        RunLogError: if the file is missing, unreadable, or holds no step at all.
    """
    path = Path(directory) / STEP_LOG_NAME
    reader = _Reader()
    for each in log_files(path) or (path,):
        reader.read(each)
    if not reader.steps:
        raise RunLogError(_without_steps(path, reader.problems))
    return RunLog(
        directory=path.parent,
        header=reader.header,
        steps=tuple(reader.steps[iteration] for iteration in sorted(reader.steps)),
        problems=(*reader.problems, *reader.remarks(path)),
        coverage=reader.coverage,
    )


class _Reader:
    """Takes in lines in the order they were written."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.steps: dict[int, Step] = {}
        self.coverage: CoverageRecord | None = None
        self.problems: list[str] = []
        self.losses = LostLines()
        self._repeated = 0

    def read(self, path: Path) -> None:
        try:
            for line in lines(path):
                try:
                    self._take(line)
                except BadLineError as error:
                    self.problems.append(line.problem(error))
        except FileNotFoundError:
            raise RunLogError(
                f"{path}: not there; train with --sparse-balance-log-dir {path.parent}"
            ) from None
        except OSError as error:
            raise RunLogError(f"{path}: {error.strerror}") from error

    def _take(self, line: Line) -> None:
        record = line.parse(("run", "step", "coverage"))
        self.losses.take(record)
        match record["type"]:
            case "run":
                self.header = record
            case "coverage":
                self.coverage = _coverage(record)
            case _:
                step = _step(record)
                self._repeated += step.iteration in self.steps
                self.steps[step.iteration] = step

    def remarks(self, path: Path) -> list[str]:
        """What the files as a whole lack."""
        found = self.losses.remarks(path)
        if not self.header:
            found.append(f"{path}: no header line, the run's configuration is unknown")
        if self._repeated:
            found.append(
                f"{path}: {self._repeated} steps ran again after a resume; the later ones count"
            )
        return found


class LostLines:
    """Counts lines that the writer says it lost: discarded for space, or dropped in haste."""

    def __init__(self) -> None:
        self._discarded = 0
        self._dropped = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises :class:`BadLineError` if a count is not a number."""
        self._discarded = max(self._discarded, int(optional_number(record, "lines_discarded") or 0))
        self._dropped += int(optional_number(record, "lines_dropped") or 0)

    def remarks(self, path: Path) -> list[str]:
        found = []
        if self._discarded:
            found.append(
                f"{path}: the {self._discarded} oldest lines were discarded while training; "
                "raise --sparse-balance-log-megabytes to keep them"
            )
        if self._dropped:
            found.append(f"{path}: {self._dropped} lines could not be written while training")
        return found


def _without_steps(path: Path, problems: list[str]) -> str:
    if problems:
        return f"no readable step: {problems[0]}"
    return f"{path}: no step; the run ended before its first step did"


def _step(record: Mapping[str, Any]) -> Step:
    iteration, tokens = number(record, "iteration"), number(record, "tokens")
    if iteration is None or tokens is None:
        raise BadLineError("iteration or tokens is null")
    measured, predicted = _rank_times(record, "measured"), _rank_times(record, "predicted")
    if measured and predicted and len(measured) != len(predicted):
        raise BadLineError(f"{len(measured)} ranks measured, {len(predicted)} predicted")
    return Step(
        iteration=int(iteration),
        iteration_ms=number(record, "iteration_ms"),
        lm_loss=number(record, "lm_loss"),
        tokens=int(tokens),
        coverage=number(record, "coverage", "mean"),
        measured_rank_ms=measured,
        predicted_rank_ms=predicted,
        lower_bound_ms=number(record, "predicted", "lower_bound_ms"),
        work_ratio=number(record, "predicted", "work_ratio"),
        micro_batch_ms=_micro_batch_times(record),
        coverage_base=optional_number(record, "coverage", "base_mean"),
        predicted_makespan_ms=optional_number(record, "predicted", "makespan_ms"),
    )


def measured_times(record: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward ms [rank, stage, virtual stage, micro-batch], NaN where unmeasured.

    Raises:
        BadLineError: an array is missing or has another shape.
    """
    forward, backward = (
        array(field(record, "measured", f"{name}_ms"), f"measured.{name}_ms")
        for name in ("forward", "backward")
    )
    if forward.ndim != 4 or forward.shape != backward.shape:
        raise BadLineError(
            f"measured.forward_ms {forward.shape} and .backward_ms {backward.shape} must both be "
            "[rank][stage][virtual stage][micro-batch]"
        )
    return forward, backward


def _micro_batch_times(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Sum of forward and backward over virtual stages; None as soon as one is missing."""
    forward_DPVM, backward_DPVM = measured_times(record)
    times_DPM = (forward_DPVM + backward_DPVM).sum(axis=2)
    if not np.isfinite(times_DPM).all():
        return None
    return tuple(tuple(tuple(stage) for stage in rank) for rank in times_DPM.tolist())


def _rank_times(record: Mapping[str, Any], side: str) -> tuple[float, ...] | None:
    """[D] ms, or None as soon as one rank has none."""
    place = f"{side}.rank_busy_ms"
    values = field(record, side, "rank_busy_ms")
    if values is None:
        return None
    if not isinstance(values, list) or not values:
        raise BadLineError(f"{place} is {values!r}, not a list of numbers")
    numbers = [finite(value, place) for value in values]
    known = [value for value in numbers if value is not None]
    return tuple(known) if len(known) == len(numbers) else None


def _coverage(record: Mapping[str, Any]) -> CoverageRecord:
    grid, bucket_blocks = (array(field(record, key), key) for key in ("grid", "bucket_blocks"))
    try:
        rows = [
            [[None] * grid.size if curve is None else curve for curve in layer]
            for layer in field(record, "curves")
        ]
    except TypeError:
        raise BadLineError("curves is not an array of numbers") from None
    curves_LUK = array(rows, "curves")
    if curves_LUK.shape != (len(rows), bucket_blocks.size, grid.size) or not len(rows):
        raise BadLineError(
            f"curves {curves_LUK.shape} must be [layer][length bucket][budget] with "
            f"{bucket_blocks.size} buckets and {grid.size} budgets"
        )
    if not (np.isfinite(grid).all() and np.isfinite(bucket_blocks).all()):
        raise BadLineError("grid or bucket_blocks holds null")
    return CoverageRecord(
        iteration=whole(record, "iteration"),
        grid=tuple(int(budget) for budget in grid.ravel()),
        bucket_blocks=tuple(int(blocks) for blocks in bucket_blocks.ravel()),
        curves_LUK=curves_LUK,
    )
