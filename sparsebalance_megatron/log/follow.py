# SPDX-License-Identifier: Apache-2.0
"""Reading a step log while it is written: only what is new, and only whole lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sparsebalance_megatron.json_file import (
    MAX_BYTES,
    NoSuchFileError,
    UnreadableFileError,
    open_regular,
)
from sparsebalance_megatron.log.log_directory import log_files, rank_files, step_log_path
from sparsebalance_megatron.log.reader import RunLogError
from sparsebalance_megatron.log.records import (
    RANK_LOG,
    STEP_LOG,
    DamagedLineError,
    Place,
    RankHeader,
    RunHeader,
    StepRecord,
    decode,
)

STEPS_KEPT = 200
_MAX_HEADER_BYTES = 1 << 20


class StepLogFollower:
    """Follows ``DIRECTORY/steps.jsonl`` of a run in progress, or of one that has ended.

    A line counts once its end is written; a log that outgrew its file is followed into the next. Of
    an iteration that runs again after a resume the later line counts, and those that came after it
    are dropped. At most the last :data:`STEPS_KEPT` steps are kept.

    Args:
        clock: seconds since any moment; never set.
        unix_clock: seconds since 1970; asked once, when the log is first seen.

    Attributes:
        header: the run's first line; None until it was read.
        steps: the last steps, by rising iteration.
        unreadable: lines that were whole and no record.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self.header: RunHeader | None = None
        self.steps: tuple[StepRecord, ...] = ()
        self.unreadable = 0
        self._path = step_log_path(directory)
        self._clock = clock
        self._unix_clock = unix_clock
        self._read_bytes: dict[tuple[int, int], int] = {}
        """Of every file that was read, by device and inode, up to the end of a line."""
        self._size_bytes = -1
        self._grown_s: float | None = None

    def poll(self) -> bool:
        """Read what was written since the last call; whether there was a new step.

        Raises:
            RunLogError: there is no log, or it cannot be read.
        """
        # Of the older file, what was written between the last look and the renaming.
        paths = log_files(self._path) if self._read_bytes else (self._path,)
        try:
            # All, not any: every file has to be read.
            return bool(sum([self._read(path) for path in paths]))
        except NoSuchFileError:
            if self._read_bytes:
                return False  # between two renames
            raise RunLogError(
                f"{self._path}: not there yet; train with --sparse-balance-log-dir {self.directory}"
            ) from None
        except (UnreadableFileError, OSError) as error:
            raise RunLogError(f"{self._path}: {error}") from error

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the log last grew; None before it was seen.

        Clocks that are set while this process runs change nothing, and one that is behind the file
        system's counts as no time at all.
        """
        return None if self._grown_s is None else self._clock() - self._grown_s

    def _read(self, path: Path) -> bool:
        with open_regular(path) as stream:
            status = os.fstat(stream.fileno())
            identity = (status.st_dev, status.st_ino)
            known_bytes = self._read_bytes.get(identity, 0)
            if path != self._path and not known_bytes:
                return False
            read_bytes = known_bytes if known_bytes <= status.st_size else 0
            stream.seek(read_bytes)
            steps = 0
            while text := stream.readline(MAX_BYTES):
                if not text.endswith(b"\n") and len(text) < MAX_BYTES:
                    break
                read_bytes += len(text)
                steps += self._take(text)
            self._read_bytes[identity] = read_bytes
            if path == self._path:
                self._note_growth(stream.tell(), status.st_mtime)
        return bool(steps)

    def _note_growth(self, size_bytes: int, written_unix_s: float) -> None:
        if self._grown_s is None:
            self._grown_s = self._clock() - max(0.0, self._unix_clock() - written_unix_s)
        elif size_bytes != self._size_bytes:
            self._grown_s = self._clock()
        self._size_bytes = size_bytes

    def _take(self, text: bytes) -> bool:
        """Whether the line is a step's."""
        if not text.strip():
            return False
        try:
            record = decode(text, STEP_LOG)
        except DamagedLineError:
            self.unreadable += 1
            return False
        if isinstance(record, RunHeader):
            self.header = record
        if not isinstance(record, StepRecord):
            return False
        before = (step for step in self.steps if step.iteration < record.iteration)
        self.steps = (*before, record)[-STEPS_KEPT:]
        return True


def hosts_of(directory: Path) -> dict[Place, str]:
    """Host of every stage of every rank, from the first lines of the ranks' logs.

    Ranks whose log is missing, damaged or names no host are not in it.
    """
    hosts: dict[Place, str] = {}
    for path in rank_files(directory):
        with (
            suppress(OSError, UnreadableFileError, DamagedLineError),
            open_regular(path) as stream,
        ):
            header = decode(stream.readline(_MAX_HEADER_BYTES), RANK_LOG)
            if isinstance(header, RankHeader) and header.host:
                hosts.setdefault(header.place, header.host)
    return hosts
