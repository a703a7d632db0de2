# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that never grow beyond a size, and never stop a run or hold it up."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from threading import BoundedSemaphore

import msgspec
from msgspec import UNSET, structs

from sparsebalance_megatron.json_file import NoSuchFileError, UnreadableFileError, open_regular
from sparsebalance_megatron.log.log_directory import older_file
from sparsebalance_megatron.log.records import (
    Count,
    DamagedLineError,
    Header,
    Record,
    decode,
    encode,
)

DEFAULT_MAX_BYTES = 64 * 10**6
_READ_BYTES = 1 << 20
_MAX_QUEUED = 64

_logger = logging.getLogger(__name__)


class _Discarded(msgspec.Struct):
    lines_discarded: Count = 0


_DISCARDED = msgspec.json.Decoder(_Discarded)


class JsonLinesFile:
    """Appends records to ``NAME.jsonl``, and drops the oldest beyond a size.

    When the file would exceed half of ``max_bytes`` it is renamed to ``NAME.1.jsonl``, in the place
    of an older one, and a new file begins with the header. A header's ``lines_discarded`` counts
    the lines lost that way. Every line is written at once and taken back if it does not fit on the
    disk, so that lines are whole. What cannot be written costs one warning, and the next line that
    can be says in ``lines_dropped`` how many were lost.

    All methods but :meth:`count_dropped` belong to one thread.

    Args:
        max_bytes: of ``NAME.jsonl`` and ``NAME.1.jsonl`` together.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.path = Path(path)
        self._half_bytes = max_bytes // 2
        self._header = Header()
        self._longest_header_bytes = 0
        # What must precede the next line: the header, behind the end of a line that was cut off.
        self._due = b""
        self._discarded = 0
        # The queue's thread counts the first, the writing thread the others.
        self._never_queued = self._not_written = self._reported = 0
        self._warned = False

    def begin(self, header: Header, *, resumed: bool) -> None:
        """Write the header: of a new file, or behind what a run left that this one resumes."""
        self._header = header
        self._longest_header_bytes = len(encode(structs.replace(header, lines_discarded=10**12)))
        self._due = self._header_line()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resumed:
                self._discarded, is_cut = _left_behind(self.path)
                self._due = (b"\n" if is_cut else b"") + self._header_line()
            else:
                for path in (self.path, older_file(self.path)):
                    path.unlink(missing_ok=True)
            self._write(b"")
        except (OSError, UnreadableFileError) as error:
            self._warn(_reason(error))

    def append(self, record: Record) -> None:
        """Write one line."""
        lost = self._never_queued + self._not_written - self._reported
        try:
            self._write(encode(structs.replace(record, lines_dropped=lost) if lost else record))
            self._reported += lost
        except OSError as error:
            self._not_written += 1
            self._warn(_reason(error))

    def count_dropped(self) -> None:
        """Count a line that was given up before it came here; from one thread, any one."""
        self._never_queued += 1
        self._warn("the disk is slower than training; lines are left out and counted")

    def _header_line(self) -> bytes:
        return encode(structs.replace(self._header, lines_discarded=self._discarded or UNSET))

    def _write(self, line: bytes) -> None:
        """Write lines that are due, and this one."""
        if self._longest_header_bytes + len(line) > self._half_bytes:
            raise OSError(errno.EFBIG, f"a line of {len(line)} bytes exceeds half of the log")
        with open(self.path, "ab", buffering=0, opener=_without_waiting) as stream:
            size = stream.tell()
            rest = memoryview(self._due + line)
            if not size or size + len(rest) <= self._half_bytes:
                try:
                    while rest:
                        rest = rest[stream.write(rest) :]
                except OSError:
                    with suppress(OSError):
                        stream.truncate(size)
                    raise
                self._due = b""
                return
        older = older_file(self.path)
        discarded = _lines_in(older)
        os.replace(self.path, older)
        self._discarded += discarded
        self._due = self._header_line()
        self._write(line)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning("sparse balance: log %s: %s", self.path, reason)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe without a reader is an error, and not waited for."""
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def _reason(error: OSError | UnreadableFileError) -> str:
    said = getattr(error, "strerror", None) or error
    return f"{said}; lines are left out and counted until it works"


def _left_behind(path: Path) -> tuple[int, bool]:
    """(lines discarded before this file, by its header; whether its last line is cut off)."""
    try:
        with open_regular(path) as stream:
            first = stream.readline(_READ_BYTES)
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
            is_cut = stream.read() not in (b"", b"\n")
    except NoSuchFileError:
        return 0, False
    with suppress(DamagedLineError):
        return decode(first, _DISCARDED).lines_discarded, is_cut
    return 0, is_cut


def _lines_in(path: Path) -> int:
    with suppress(FileNotFoundError), path.open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(_READ_BYTES), b""))
    return 0


class BackgroundLog:
    """A log file whose lines are made and written on a thread.

    A process that was forked from this one has no such thread, and writes nothing.

    Args:
        worker: one thread, which several logs may share; the process ends when it is done.
        max_queued: lines that may wait.
    """

    def __init__(
        self, file: JsonLinesFile, worker: Executor, *, max_queued: int = _MAX_QUEUED
    ) -> None:
        self._file = file
        self._worker = worker
        self._room = BoundedSemaphore(max_queued)

    def begin(self, header: Header, *, resumed: bool) -> None:
        """See :meth:`JsonLinesFile.begin`."""
        self._submit(lambda: self._file.begin(header, resumed=resumed))

    def append(self, make_record: Callable[[], Record]) -> None:
        """Queue a line, made there from what no longer changes; drop and count it if too many
        wait."""
        self._submit(lambda: self._file.append(make_record()))

    def _submit(self, job: Callable[[], None]) -> None:
        if not self._room.acquire(blocking=False):
            self._file.count_dropped()
            return
        # The process ends: executors take nothing more.
        with suppress(RuntimeError):
            self._worker.submit(self._work, job)

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            _logger.exception("sparse balance: logs: a line could not be made and is left out")
        finally:
            self._room.release()
