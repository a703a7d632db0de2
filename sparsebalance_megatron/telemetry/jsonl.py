# SPDX-License-Identifier: Apache-2.0
"""Lines of a JSON log, and the values in a line; what is wrong with one is said, not raised on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LINES_DISCARDED, LINES_DROPPED = "lines_discarded", "lines_dropped"
"""Keys of counts: of a header, lines lost for space; of any line, those before it that were left
out."""

_ITERATION = re.compile(rb'"iteration":\s*(\d+)')
_PREFIX_BYTES = 200
_LARGEST_INDEX = 2**40


class BadLineError(Exception):
    """A line that is not a record of this log, or a value that is not what it should be."""


@dataclass(frozen=True)
class Line:
    """One line of a file, counted from 1."""

    path: Path
    number: int
    text: bytes

    @property
    def iteration(self) -> int | None:
        """Of a step's record, without parsing the line; None where it is not near the start."""
        found = _ITERATION.search(self.text, 0, _PREFIX_BYTES)
        return int(found[1]) if found else None

    def parse(self, types: Collection[str]) -> dict[str, Any]:
        """The record.

        Raises:
            BadLineError: the line is cut off, not JSON, or its type is another.
        """
        try:
            record = json.loads(self.text.decode("utf-8", errors="replace"))
        except RecursionError:
            raise BadLineError("cut off or not JSON (nested too deep)") from None
        except ValueError as error:
            reason = (
                f"{error.msg}, column {error.colno}"
                if isinstance(error, json.JSONDecodeError)
                else "a number of too many digits"
            )
            raise BadLineError(f"cut off or not JSON ({reason})") from None
        if not isinstance(record, dict) or record.get("type") not in types:
            raise BadLineError(f"no record of type {' or '.join(f'"{name}"' for name in types)}")
        return record

    def problem(self, error: BadLineError) -> str:
        return f"{self.path} line {self.number}: {error}; left out"


class LostLines:
    """Counts lines that the writer says it lost: discarded for space, or dropped in haste."""

    def __init__(self) -> None:
        self._discarded = 0
        self._dropped = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises :class:`BadLineError` if a count is not a number."""
        self._discarded = max(self._discarded, int(optional_number(record, LINES_DISCARDED) or 0))
        self._dropped += int(optional_number(record, LINES_DROPPED) or 0)

    def remarks(self, path: Path) -> list[str]:
        """What was lost, one sentence each."""
        found = []
        if self._discarded:
            found.append(
                f"{path}: the {self._discarded} oldest lines were discarded while training; "
                "raise --sparse-balance-log-megabytes to keep them"
            )
        if self._dropped:
            found.append(f"{path}: {self._dropped} lines could not be written while training")
        return found


def older_file(path: Path) -> Path:
    """Where a log that outgrew its file keeps the lines before: ``NAME.1.jsonl``."""
    return path.with_suffix(f".1{path.suffix}")


def newest_file(path: Path) -> Path:
    """The inverse of :func:`older_file`; ``NAME.jsonl`` itself stays."""
    return path.with_name(path.name.replace(".1.jsonl", ".jsonl"))


def log_files(path: Path) -> tuple[Path, ...]:
    """The files of one log that are there, older lines first: ``NAME.1.jsonl``, ``NAME.jsonl``."""
    return tuple(each for each in (older_file(path), path) if each.exists())


def lines(path: Path) -> Iterator[Line]:
    """Every line of one file, as it is read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        for number, text in enumerate(stream, start=1):
            yield Line(path, number, text)


def field(record: Mapping[str, Any], *keys: str) -> Any:
    """A value, keys one inside the other.

    Raises:
        BadLineError: there is none.
    """
    value: Any = record
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise BadLineError(f"no {'.'.join(keys)}")
        value = value[key]
    return value


def optional_field(record: Mapping[str, Any], *keys: str) -> Any:
    """A value, or None where it is missing: a key that not every version writes."""
    try:
        return field(record, *keys)
    except BadLineError:
        return None


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """A number; None for null. Raises :class:`BadLineError` if it is missing or something else."""
    return finite(field(record, *keys), ".".join(keys))


def optional_number(record: Mapping[str, Any], *keys: str) -> float | None:
    """As :func:`number`, but None where it is missing."""
    return finite(optional_field(record, *keys), ".".join(keys))


def whole(record: Mapping[str, Any], *keys: str) -> int:
    """An integer of at least 0; raises :class:`BadLineError` for all else, null included."""
    return index(field(record, *keys), ".".join(keys))


def index(value: Any, place: str) -> int:
    """An integer from 0 up to any number of ranks, layers, steps or tokens there may be."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_INDEX:
        raise BadLineError(f"{place} is {str(value)[:60]}, not an integer of at least 0")
    return value


def finite(value: Any, place: str) -> float | None:
    """The number; None for null and for what is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLineError(f"{place} is {repr(value)[:60]}, not a number")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        raise BadLineError(f"{place} is an integer beyond all numbers") from None


def array(value: Any, place: str) -> np.ndarray:
    """float64, NaN for null and for what is not finite.

    Raises:
        BadLineError: it is ragged, or not of numbers.
    """
    try:
        numbers = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise BadLineError(f"{place} is not an array of numbers") from None
    return np.where(np.isfinite(numbers), numbers, np.nan)
