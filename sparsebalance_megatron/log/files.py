# SPDX-License-Identifier: Apache-2.0
"""A run's log directory, of one run at a time, and the files in it: JSON lines of bounded size.

Lines are written on a thread, and a lost one is counted.
"""

import atexit
import errno
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from msgspec import UNSET, structs

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.json_file import UnreadableFileError, open_regular
from sparsebalance_megatron.log.records import (
    LARGEST_COUNT,
    LINE_START,
    DamagedLineError,
    Header,
    Record,
    decode,
    encode,
)

EARLIER = "earlier"
"""``DIR/earlier/N`` holds the logs of the Nth run that another one began after."""
DEFAULT_MAX_BYTES = 64 * 10**6

_LOCK = ".lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""A full disk costs log lines, which are counted, and no training."""
_READ_BYTES = 1 << 20
_MAX_QUEUED = 64

_logger = logging.getLogger(__name__)


def step_log_path(directory: str | Path) -> Path:
    return Path(directory) / "steps.jsonl"


def rank_log_path(directory: str | Path, world_rank: int) -> Path:
    return Path(directory) / "ranks" / f"rank-{world_rank:05d}.jsonl"


def older_file(path: Path) -> Path:
    """File of the earlier lines of a log that outgrew its size."""
    return path.with_name(f"{path.name}.1")


class LogDirectoryError(ValueError):
    """Logs cannot be written where they should be, or another run writes there."""


class LogDirectory:
    """A directory for the logs of one run; every rank has an object of its own. Its claim belongs
    to the process and ends with it, however it ends."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self._lock: Any = None

    def check(self) -> str | None:
        """Raise unless logs could be written, without writing; a remark where none can tell."""
        existing = next(filter(os.path.lexists, (self.path, *self.path.parents)))
        if not existing.is_dir():
            raise self._error(f"{existing} is not a directory; name another")
        try:
            # Leaves nothing behind; os.access does not know file systems such as /proc.
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            if existing != self.path and isinstance(error, PermissionError):
                return f"the log directory {self.path}, which does not exist here"
            raise self._error(f"cannot be written ({error.strerror}); name another") from error
        return None

    def make(self, *, claim: bool) -> None:
        """Make the directory, write a file that goes at once, and, of one rank per run, keep other
        runs out by a claim."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
            if claim:
                self._claim()
        except FileExistsError as error:
            raise self._error("is not a directory; name another") from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise self._error(f"cannot be written ({error.strerror}); name another") from error

    def number_for_earlier_logs(self) -> int:
        """The number that logs of an earlier run would get; 0 where there are none."""
        if not any(path.exists() for path in self._logs()):
            return 0
        folder = self.path / EARLIER
        known = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return 1 + max((int(name) for name in known if name.isdecimal()), default=0)

    def set_aside(self, number: int) -> Path:
        """Move an earlier run's logs to ``earlier/NUMBER``, which is returned.

        All ranks may do it at once: the first one moves a log.
        """
        target = self.path / EARLIER / str(number)
        try:
            target.mkdir(parents=True, exist_ok=True)
            for path in self._logs():
                with suppress(FileNotFoundError):
                    path.rename(target / path.name)
        except OSError as error:
            raise self._error(
                f"an earlier run's logs cannot be kept ({error.strerror}); move them, or name "
                "another directory"
            ) from error
        return target

    def _logs(self) -> tuple[Path, ...]:
        steps = step_log_path(self.path)
        return steps, older_file(steps), rank_log_path(self.path, 0).parent

    def _claim(self) -> None:
        from filelock import FileLock, Timeout

        lock = self.path / _LOCK
        # A trainer may go on in the process in which it stopped.
        self._lock = FileLock(lock, is_singleton=True)
        try:
            self._lock.acquire(timeout=0)
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except Timeout as error:
            owner = lock.read_text(errors="replace")[:200].strip() or "unknown"
            raise self._error(
                f"another run writes there ({owner}); give every run a directory of its own"
            ) from error
        # Releases of filelock before 4 raise it where a file system has no locks.
        except NotImplementedError:
            _logger.warning(
                "sparse balance: %s: no locks on this file system; nothing keeps a second run from "
                "writing there",
                self.path,
            )

    def _error(self, problem: str) -> LogDirectoryError:
        return LogDirectoryError(f"{flag_name('log_dir')} {self.path}: {problem}")


class LogWriter:
    """A log file; its records are made and written on a thread.

    ``NAME.jsonl`` and the older ``NAME.jsonl.1`` together stay within ``max_bytes``: the oldest
    half is deleted, and the next header says in ``lines_discarded`` how many lines went that way.
    Lines that cannot be queued, made or written cost one warning, and the next line that can be
    says in ``lines_dropped`` how many they were. Nothing here stops a run or holds it up. The
    process ends when all lines are written; one that was forked from it writes none.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_queued: int = _MAX_QUEUED,
    ) -> None:
        self._path, self._header, self._max_bytes = Path(path), header, max_bytes // 2
        longest_header = encode(structs.replace(header, lines_discarded=LARGEST_COUNT))
        self._room_bytes = self._max_bytes - len(longest_header)
        self._file: FileIO | None = None
        self._discarded: int | None = None
        # Who queues counts the first, the writing thread the others.
        self._never_queued = self._not_written = self._reported = 0
        self._has_warned = False
        self._queue: Queue[Callable[[], object] | None] = Queue(max_queued)
        self._process = os.getpid()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._queue.put(self._open)

    def append(self, make_record: Callable[[], Record]) -> None:
        """Queue a line, which is made on the thread from what no longer changes."""
        try:
            self._queue.put_nowait(partial(self._write, make_record))
        except Full:
            self._never_queued += 1
            self._warn("the disk is slower than training")

    def flush(self) -> None:
        """Wait until what is queued is written, or counted."""
        self._queue.join()

    def close(self) -> None:
        atexit.unregister(self.close)
        if os.getpid() == self._process:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:
                self._warn(str(getattr(error, "strerror", None) or error))
                if isinstance(error, OSError):
                    # The next line begins anew behind what was written of this one.
                    self._close_file()
            self._queue.task_done()
        self._close_file()

    def _write(self, make_record: Callable[[], Record]) -> None:
        lost = self._never_queued + self._not_written - self._reported
        self._not_written += 1
        record = make_record()
        line = encode(structs.replace(record, lines_dropped=lost) if lost else record)
        if len(line) >= self._room_bytes:
            raise ValueError(f"a line of {len(line)} bytes exceeds half of the log")
        file = self._file or self._open()
        if file.tell() + len(line) >= self._max_bytes:
            self._set_aside()
            file = self._open()
        _write_whole(file, line)
        self._not_written -= 1
        self._reported += lost

    def _open(self) -> FileIO:
        """The file, with a header at its end."""
        if self._discarded is None:
            self._discarded = _discarded_before(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._path.stat().st_size if self._path.exists() else 0
        # A line that was cut off gets an end, of one byte.
        if before + 1 > self._room_bytes:
            self._set_aside()
        file = self._file = FileIO(self._path, "a+")
        if file.tell():
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        header = structs.replace(self._header, lines_discarded=self._discarded or UNSET)
        _write_whole(file, encode(header))
        return file

    def _set_aside(self) -> None:
        """Make the file the older one, in whose place."""
        self._close_file()
        older = older_file(self._path)
        self._discarded = (self._discarded or 0) + _lines_in(older)
        self._path.replace(older)

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "sparse balance: log %s: %s; lines are left out and counted until it works",
                self._path,
                reason,
            )


def _write_whole(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _discarded_before(path: Path) -> int:
    with suppress(UnreadableFileError, OSError, DamagedLineError), open_regular(path) as stream:
        return decode(stream.readline(_READ_BYTES), LINE_START).lines_discarded
    return 0


def _lines_in(path: Path) -> int:
    with suppress(FileNotFoundError), path.open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(_READ_BYTES), b""))
    return 0
