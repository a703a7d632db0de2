# SPDX-License-Identifier: Apache-2.0
"""The files of a log, and their lines in the order they were written."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import UNSET

from sparsebalance_megatron.log.records import DamagedLineError, Header, Record, decode


class _Iteration(msgspec.Struct):
    iteration: int | None = None


_ITERATION = msgspec.json.Decoder(_Iteration)


def older_file(path: Path) -> Path:
    """Where a log that outgrew its file keeps the lines before: ``NAME.1.jsonl``."""
    return path.with_suffix(f".1{path.suffix}")


def newest_file(path: Path) -> Path:
    """The inverse of :func:`older_file`; ``NAME.jsonl`` itself stays."""
    return path.with_name(path.name.replace(".1.jsonl", ".jsonl"))


def log_files(path: Path) -> tuple[Path, ...]:
    """The files of one log that are there, older lines first: ``NAME.1.jsonl``, ``NAME.jsonl``."""
    return tuple(each for each in (older_file(path), path) if each.exists())


class LogReader[R: Record]:
    """Reads the files of one log, and notes what they lack in ``problems``.

    Args:
        decoder: :data:`.records.STEP_LOG` or :data:`.records.RANK_LOG`.
        wanted: iterations to decode; None for all.
    """

    def __init__(
        self, decoder: msgspec.json.Decoder[R], wanted: Collection[int] | None = None
    ) -> None:
        self.problems: list[str] = []
        self._decoder = decoder
        self._wanted = wanted
        self._discarded = self._dropped = 0

    def records(self, path: Path) -> Iterator[R]:
        """The records of one file, as they are read; damaged lines are noted and left out.

        Raises:
            OSError: the file cannot be read.
        """
        with path.open("rb") as stream:
            for number, text in enumerate(stream, start=1):
                if self._is_unwanted(text):
                    continue
                try:
                    record = decode(text, self._decoder)
                except DamagedLineError as error:
                    self.problems.append(f"{path} line {number}: {error}; left out")
                    continue
                self._count_lost(record)
                yield record

    def remarks(self, path: Path) -> list[str]:
        """What the writer said it lost, one sentence each."""
        found = []
        if self._discarded:
            found.append(
                f"{path}: the {self._discarded} oldest lines were discarded while training; "
                "raise --sparse-balance-log-megabytes to keep them"
            )
        if self._dropped:
            found.append(f"{path}: {self._dropped} lines could not be written while training")
        return found

    def _is_unwanted(self, text: bytes) -> bool:
        if self._wanted is None:
            return False
        with suppress(DamagedLineError):
            iteration = decode(text, _ITERATION).iteration
            return iteration is not None and iteration not in self._wanted
        return False

    def _count_lost(self, record: Record) -> None:
        if record.lines_dropped is not UNSET:
            self._dropped += record.lines_dropped
        if isinstance(record, Header) and record.lines_discarded is not UNSET:
            self._discarded = max(self._discarded, record.lines_discarded)


def iterations_in(path: Path) -> set[int]:
    """Iterations that one file speaks of.

    Raises:
        OSError: the file cannot be read.
    """
    found = set()
    with path.open("rb") as stream:
        for text in stream:
            with suppress(DamagedLineError):
                found.add(decode(text, _ITERATION).iteration)
    return {iteration for iteration in found if iteration is not None}
