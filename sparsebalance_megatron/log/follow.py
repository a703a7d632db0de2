# SPDX-License-Identifier: Apache-2.0
"""Reading a step log while it is written: only what is new, and only whole lines.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sparsebalance_megatron.log.rank_log import rank_files
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
from sparsebalance_megatron.log.step_log import RunLogError, step_log_path

STEPS_KEPT = 200
_MAX_HEADER_BYTES = 1 << 20


class StepLogFollower:
    """Follows ``DIRECTORY/steps.jsonl`` of a run in progress, or of one that has ended.

    A line counts once its end is written; a log that outgrew its file is followed into the next. Of
    an iteration that runs again after a resume the later line counts, and those that came after it
    are dropped. At most the last :data:`STEPS_KEPT` steps are kept.

    Attributes:
        header: the run's first line, by key; empty until it was read.
        steps: the last steps, by rising iteration.
        unreadable: lines that were whole and no record.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.header: Mapping[str, Any] = {}
        self.steps: tuple[StepRecord, ...] = ()
        self.unreadable = 0
        self._path = step_log_path(directory)
        self._stream: BinaryIO | None = None
        self._partial = b""

    def poll(self) -> bool:
        """Read what was written since the last call; whether there was a new step.

        Raises:
            RunLogError: there is no log, or it cannot be read.
        """
        try:
            if self._stream is None:
                self._open()
            is_new = self._take_all()
            while self._was_replaced():
                # What was written between the last look and the renaming.
                is_new |= self._take_all()
                self._open()
                is_new |= self._take_all()
        except FileNotFoundError:
            raise RunLogError(
                f"{self._path}: not there yet; train with --sparse-balance-log-dir {self.directory}"
            ) from None
        except OSError as error:
            raise RunLogError(f"{self._path}: {error.strerror}") from error
        return is_new

    @property
    def written_unix_s(self) -> float | None:
        """When the file last grew, by the clock of its file system; None where it cannot be told.

        Another machine's clock may differ from it, and both may be set anew at any time.
        """
        with suppress(OSError):
            return self._path.stat().st_mtime
        return None

    def close(self) -> None:
        """Let go of the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> None:
        self.close()
        self._stream = self._path.open("rb")
        self._partial = b""

    def _was_replaced(self) -> bool:
        """Whether the name belongs to another file by now, or the file was cut."""
        assert self._stream is not None
        opened = os.fstat(self._stream.fileno())
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False  # between two renames; the next poll sees the new file
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino) or (
            named.st_size < self._stream.tell()
        )

    def _take_all(self) -> bool:
        assert self._stream is not None
        *whole_lines, self._partial = (self._partial + self._stream.read()).split(b"\n")
        # All, not any: every line has to be taken.
        return bool(sum([self._take(text) for text in whole_lines]))

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
            self.header = msgspec.to_builtins(record)
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
        with suppress(OSError, DamagedLineError), path.open("rb") as stream:
            header = decode(stream.readline(_MAX_HEADER_BYTES), RANK_LOG)
            if isinstance(header, RankHeader) and header.host:
                hosts.setdefault(header.place, header.host)
    return hosts


class QuietTime:
    """For how long a log has not grown, by a clock that nobody sets.

    A wall clock is asked once, for the time before the first look: one that is set back or forward
    later changes nothing, and one that is behind the file system's counts as no time at all.

    Args:
        clock: seconds since any moment; never set.
        unix_clock: seconds since 1970.
    """

    def __init__(
        self,
        follower: StepLogFollower,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._follower = follower
        self._clock = clock
        self._unix_clock = unix_clock
        self._written_unix_s: float | None = None
        self._since_s = 0.0

    def seconds(self) -> float | None:
        """Since the log last grew; None where that cannot be told."""
        written_unix_s = self._follower.written_unix_s
        if written_unix_s is None:
            return None
        now_s = self._clock()
        if self._written_unix_s is None:
            self._since_s = now_s - max(0.0, self._unix_clock() - written_unix_s)
        elif written_unix_s != self._written_unix_s:
            self._since_s = now_s
        self._written_unix_s = written_unix_s
        return now_s - self._since_s
