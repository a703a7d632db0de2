# SPDX-License-Identifier: Apache-2.0
"""Log files: JSON lines of bounded size, written on a thread; a lost line is counted."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue

import msgspec
from msgspec import UNSET, structs

from sparsebalance_megatron.json_file import UnreadableFileError, open_regular
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


class RunLog:
    """A log file; its records are made and written on a thread.

    ``NAME.jsonl`` and the older ``NAME.jsonl.1`` together stay within ``max_bytes``: the oldest
    half is deleted, and the next header says in ``lines_discarded`` how many lines went that way.
    Lines that cannot be queued, made or written cost one warning, and the next line that can be
    says in ``lines_dropped`` how many they were. Nothing here stops a run or holds it up. The
    process ends when all lines are written; one that was forked from it writes none.

    Args:
        header: first line of every file, and of what a process appends to one.
        max_queued: lines that may wait.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        self._lines = LinesHandler(Path(path), header, max_bytes)
        self._queue: Queue[logging.LogRecord] = Queue(max_queued)
        self._listener = QueueListener(self._queue, self._lines)
        self._process = os.getpid()
        self._listener.start()
        atexit.register(self.close)
        self._put(None)

    def append(self, make_record: Callable[[], Record]) -> None:
        """Queue a line, which is made on the thread from what no longer changes."""
        self._put(make_record)

    def flush(self) -> None:
        """Wait until what is queued is written, or counted."""
        self._queue.join()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        atexit.unregister(self.close)
        if os.getpid() == self._process:
            self.flush()
            self._listener.stop()
            self._lines.close()

    def _put(self, make_record: Callable[[], Record] | None) -> None:
        try:
            self._queue.put_nowait(logging.makeLogRecord({"msg": make_record}))
        except Full:
            self._lines.never_queued += 1
            self._lines.warn("the disk is slower than training")


class LinesHandler(RotatingFileHandler):
    """Writes what log records make: a line each, or where that is None, the header alone."""

    def __init__(self, path: Path, header: Header, max_bytes: int) -> None:
        super().__init__(path, maxBytes=max_bytes // 2, backupCount=1, encoding="utf-8", delay=True)
        self.terminator = ""
        self._path = path
        self._header = header
        self._discarded: int | None = None
        # The queue's thread counts the first, the writing thread the others.
        self.never_queued = self._not_written = self._reported = 0
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; whatever happens, it is written or counted."""
        lost, failed = self.never_queued + self._not_written - self._reported, self._not_written
        make: Callable[[], Record] | None = record.msg  # type: ignore[assignment]
        try:
            line = ""
            if make is not None:
                made = make()
                line = encode(structs.replace(made, lines_dropped=lost) if lost else made).decode()
            if len(line) + len(self._header_line()) >= self.maxBytes:
                raise ValueError(f"a line of {len(line)} bytes exceeds half of the log")
        except Exception as error:
            self._lose(record, error)
            return
        record.msg = line
        super().emit(record)
        if line and self._not_written == failed:
            self._reported += lost

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the line, and begin anew behind what was written of it."""
        self._lose(record, sys.exception())
        stream, self.stream = self.stream, None
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.close()

    def _lose(self, record: logging.LogRecord, error: BaseException | None) -> None:
        self._not_written += bool(record.msg)
        self.warn(str(getattr(error, "strerror", None) or error))

    def warn(self, reason: str) -> None:
        """Say once that lines are lost."""
        if not self._warned:
            self._warned = True
            _logger.warning(
                "sparse balance: log %s: %s; lines are left out and counted until it works",
                self._path,
                reason,
            )

    def doRollover(self) -> None:
        """Count what goes."""
        self._discarded = (self._discarded or 0) + _lines_in(older_file(self._path))
        super().doRollover()

    def _open(self) -> TextIOWrapper:
        if self._discarded is None:
            self._discarded = _discarded_before(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut = "\n" if _ends_cut_off(self._path) else ""
        stream = super()._open()
        stream.write(cut + self._header_line())
        return stream

    def _header_line(self) -> str:
        return encode(
            structs.replace(self._header, lines_discarded=self._discarded or UNSET)
        ).decode()


class _Discarded(msgspec.Struct):
    lines_discarded: Count = 0


_DISCARDED = msgspec.json.Decoder(_Discarded)


def _discarded_before(path: Path) -> int:
    """Lines discarded before this file, by its header."""
    with suppress(UnreadableFileError, OSError, DamagedLineError), open_regular(path) as stream:
        return decode(stream.readline(_READ_BYTES), _DISCARDED).lines_discarded
    return 0


def _ends_cut_off(path: Path) -> bool:
    """Whether a file ends within a line."""
    with suppress(UnreadableFileError, OSError), open_regular(path) as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"
    return False


def _lines_in(path: Path) -> int:
    with suppress(FileNotFoundError), path.open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(_READ_BYTES), b""))
    return 0
