# SPDX-License-Identifier: Apache-2.0
"""Reads the step log of a run: a header line, then one JSON line per step.

What a damaged file still says is kept; every line that had to be left out is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STEP_LOG_NAME = "steps.jsonl"


class RunLogError(ValueError):
    """A run left no usable step log."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step as logged. Times in ms; None where nothing was measured.

    ``measured_rank_ms`` and ``predicted_rank_ms`` hold, per data-parallel rank, the computing time
    of its busiest pipeline stage. ``lower_bound_ms`` and ``work_ratio`` are the planner's.
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


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run's header and steps by rising iteration; ``problems`` says what the file lacks."""

    directory: Path
    header: Mapping[str, Any]
    steps: tuple[Step, ...]
    problems: tuple[str, ...]


def read_run_log(directory: str | Path) -> RunLog:
    """Read ``DIRECTORY/steps.jsonl``.

    A resumed run appends to its log: of an iteration that is there twice the later line counts.

    Raises:
        RunLogError: if the file is missing, unreadable, or holds no step at all.
    """
    path = Path(directory) / STEP_LOG_NAME
    header: dict[str, Any] = {}
    steps: dict[int, Step] = {}
    problems: list[str] = []
    repeated = 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = _parse(line)
            if record["type"] == "run":
                header = record
                continue
            step = _step(record)
        except _BadLineError as error:
            problems.append(f"{path} line {number}: {error}; left out")
            continue
        repeated += step.iteration in steps
        steps[step.iteration] = step
    if not steps:
        raise RunLogError(_without_steps(path, problems))
    if not header:
        problems.append(f"{path}: no header line, the run's configuration is unknown")
    if repeated:
        problems.append(f"{path}: {repeated} steps ran again after a resume; the later ones count")
    return RunLog(
        directory=path.parent,
        header=header,
        steps=tuple(steps[iteration] for iteration in sorted(steps)),
        problems=tuple(problems),
    )


class _BadLineError(Exception):
    """A line that is not a record of a step log."""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise RunLogError(
            f"{path}: not there; train with --sparse-balance-log-dir {path.parent}"
        ) from None
    except OSError as error:
        raise RunLogError(f"{path}: {error.strerror}") from error


def _without_steps(path: Path, problems: list[str]) -> str:
    if problems:
        return f"no readable step: {problems[0]}"
    return f"{path}: no step; the run ended before its first step did"


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadLineError(f"cut off or not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(record, dict) or record.get("type") not in ("run", "step"):
        raise _BadLineError('no record of type "run" or "step"')
    return record


def _step(record: Mapping[str, Any]) -> Step:
    iteration, tokens = _number(record, "iteration"), _number(record, "tokens")
    if iteration is None or tokens is None:
        raise _BadLineError("iteration or tokens is null")
    measured, predicted = _rank_times(record, "measured"), _rank_times(record, "predicted")
    if measured and predicted and len(measured) != len(predicted):
        raise _BadLineError(f"{len(measured)} ranks measured, {len(predicted)} predicted")
    return Step(
        iteration=int(iteration),
        iteration_ms=_number(record, "iteration_ms"),
        lm_loss=_number(record, "lm_loss"),
        tokens=int(tokens),
        coverage=_number(record, "coverage", "mean"),
        measured_rank_ms=measured,
        predicted_rank_ms=predicted,
        lower_bound_ms=_number(record, "predicted", "lower_bound_ms"),
        work_ratio=_number(record, "predicted", "work_ratio"),
        micro_batch_ms=_micro_batch_times(record),
    )


def _micro_batch_times(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Sum of forward and backward over virtual stages; None as soon as one is missing."""
    try:
        forward, backward = (
            np.array(_field(record, "measured", f"{name}_ms"), dtype=np.float64)
            for name in ("forward", "backward")
        )
    except (TypeError, ValueError):
        raise _BadLineError("measured.forward_ms or .backward_ms is not an array") from None
    if forward.ndim != 4 or forward.shape != backward.shape:
        raise _BadLineError(
            f"measured.forward_ms {forward.shape} and .backward_ms {backward.shape} must both be "
            "[rank][stage][virtual stage][micro-batch]"
        )
    times_DPM = (forward + backward).sum(axis=2)
    if not np.isfinite(times_DPM).all():
        return None
    return tuple(tuple(tuple(stage) for stage in rank) for rank in times_DPM.tolist())


def _rank_times(record: Mapping[str, Any], side: str) -> tuple[float, ...] | None:
    """[D] ms, or None as soon as one rank has none."""
    place = f"{side}.rank_busy_ms"
    values = _field(record, side, "rank_busy_ms")
    if values is None:
        return None
    if not isinstance(values, list) or not values:
        raise _BadLineError(f"{place} is {values!r}, not a list of numbers")
    numbers = [_finite(value, place) for value in values]
    known = [number for number in numbers if number is not None]
    return tuple(known) if len(known) == len(numbers) else None


def _number(record: Mapping[str, Any], *keys: str) -> float | None:
    return _finite(_field(record, *keys), ".".join(keys))


def _field(record: Mapping[str, Any], *keys: str) -> Any:
    value: Any = record
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise _BadLineError(f"no {'.'.join(keys)}")
        value = value[key]
    return value


def _finite(value: Any, place: str) -> float | None:
    """The number; None for null and for what is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadLineError(f"{place} is {value!r}, not a number")
    return float(value) if math.isfinite(value) else None
