# SPDX-License-Identifier: Apache-2.0
"""Reading a step log while it is written: only what is new, and only whole lines.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.telemetry.jsonl import BadLineError, Line
from sparsebalance_megatron.telemetry.rank_log import rank_files
from sparsebalance_megatron.telemetry.rank_record import RANK, Place, read_rank_header
from sparsebalance_megatron.telemetry.step_log import RUN, RunLogError, step_log_path
from sparsebalance_megatron.telemetry.step_record import (
    STEP,
    MicroBatchTimes,
    Step,
    read_step,
    read_times,
)

STEPS_KEPT = 200
_TAIL_BYTES = 4 << 20
"""What is read of a log that is long already: a slow disk should not delay the first look."""
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """A step, with what its stages computed: ms, NaN where not measured, None where not logged."""

    step: Step
    measured_RP: np.ndarray
    predicted_RP: np.ndarray | None


class StepLogFollower:
    """Follows ``DIRECTORY/steps.jsonl`` of a run in progress, or of one that has ended.

    A line counts once its end is written; a log that outgrew its file is followed into the next. Of
    an iteration that runs again after a resume the later line counts, and those that came after it
    are dropped. At most the last :data:`STEPS_KEPT` steps are kept.

    Attributes:
        header: the run's first line; empty until it was read.
        steps: the last steps, by rising iteration.
        last_times: of the micro-batches of the last step; None before the first.
        unreadable: lines that were whole and no record.
        skipped_bytes: of a long log, what was written before the follower began and is not read.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.header: Mapping[str, Any] = {}
        self.steps: tuple[SeenStep, ...] = ()
        self.last_times: MicroBatchTimes | None = None
        self.unreadable = 0
        self.skipped_bytes = 0
        self._path = step_log_path(directory)
        self._stream: BinaryIO | None = None
        self._partial = b""
        self._by_iteration: dict[int, SeenStep] = {}

    def poll(self) -> bool:
        """Read what was written since the last call; whether there was a new step.

        Raises:
            RunLogError: there is no log, or it cannot be read.
        """
        try:
            if self._stream is None:
                self._open(skip=True)
            is_new = self._take_all()
            while self._was_replaced():
                # What was written between the last look and the renaming.
                is_new |= self._take_all()
                self._open(skip=False)
                is_new |= self._take_all()
        except FileNotFoundError:
            raise RunLogError(
                f"{self._path}: not there yet; train with --sparse-balance-log-dir {self.directory}"
            ) from None
        except OSError as error:
            raise RunLogError(f"{self._path}: {error.strerror}") from error
        kept = sorted(self._by_iteration)[-STEPS_KEPT:]
        self._by_iteration = {each: self._by_iteration[each] for each in kept}
        self.steps = tuple(self._by_iteration.values())
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

    def _open(self, *, skip: bool) -> None:
        self.close()
        self._stream = self._path.open("rb")
        self._partial = b""
        size = os.fstat(self._stream.fileno()).st_size
        if skip and size > _TAIL_BYTES + _HEADER_BYTES:
            self._take(self._stream.readline(_HEADER_BYTES))
            self.skipped_bytes = size - _TAIL_BYTES - self._stream.tell()
            self._stream.seek(size - _TAIL_BYTES)
            self._stream.readline()

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
            record = Line(self._path, 0, text).parse((RUN, STEP, "coverage"))
            if record["type"] == RUN:
                self.header = record
            if record["type"] != STEP:
                return False
            step, times = read_step(record), read_times(record)
        except BadLineError:
            self.unreadable += 1
            return False
        predicted = times.predicted_2RPVM
        self._by_iteration = {
            iteration: seen
            for iteration, seen in self._by_iteration.items()
            if iteration < step.iteration
        }
        self._by_iteration[step.iteration] = SeenStep(
            step=step,
            measured_RP=stage_busy_ms(times.measured_2RPVM),
            predicted_RP=None if predicted is None else stage_busy_ms(predicted),
        )
        self.last_times = times
        return True


def hosts_of(directory: Path) -> dict[Place, str]:
    """Host of every stage of every rank, from the first lines of the ranks' logs.

    Ranks whose log is missing, damaged or names no host are not in it.
    """
    hosts: dict[Place, str] = {}
    for path in rank_files(directory):
        with suppress(OSError, BadLineError), path.open("rb") as stream:
            line = Line(path, 1, stream.readline(_HEADER_BYTES))
            header = read_rank_header(line.parse((RANK,)))
            if header.host:
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
