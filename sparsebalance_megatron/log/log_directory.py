# SPDX-License-Identifier: Apache-2.0
"""The directory of ``--sparse-balance-log-dir``: its files, and one run at a time."""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebalance_megatron.config import flag_name

EARLIER = "earlier"
"""``DIR/earlier/N`` holds the logs of the Nth run that another one began after."""

_LOCK = ".lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""A full disk costs log lines, which are counted, and no training."""

_logger = logging.getLogger(__name__)


def step_log_path(directory: str | Path) -> Path:
    """``DIR/steps.jsonl``."""
    return Path(directory) / "steps.jsonl"


def rank_log_path(directory: str | Path, world_rank: int) -> Path:
    """``DIR/ranks/rank-00000.jsonl``."""
    return Path(directory) / "ranks" / f"rank-{world_rank:05d}.jsonl"


def older_file(path: Path) -> Path:
    """File of the earlier lines of a log that outgrew its size: ``NAME.jsonl.1``."""
    return path.with_name(f"{path.name}.1")


class LogDirectoryError(ValueError):
    """Logs cannot be written where they should be, or another run writes there."""


class LogDirectory:
    """A directory for the logs of one run; every rank has an object of its own.

    The claim on it belongs to the process and ends with it, however it ends.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self._lock: Any = None

    def check(self) -> str | None:
        """Whether logs could be written, without writing; a remark where that cannot be told.

        Raises:
            LogDirectoryError: if they could not.
        """
        existing = next(filter(os.path.lexists, (self.path, *self.path.parents)))
        if not existing.is_dir():
            raise self._error(f"{existing} is not a directory; name another")
        try:
            # Leaves nothing behind; os.access does not know file systems such as /proc.
            with tempfile.TemporaryFile(dir=existing):
                return None
        except OSError as error:
            if existing != self.path and isinstance(error, PermissionError):
                return f"the log directory {self.path}, which does not exist here"
            raise self._error(f"cannot be written ({error.strerror}); name another") from error

    def make(self, *, claim: bool) -> None:
        """Make the directory, and write a file that goes at once.

        Args:
            claim: whether to keep other runs out; of one rank per run.

        Raises:
            LogDirectoryError: if files cannot be written, or another process has the claim.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
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

        Raises:
            LogDirectoryError: if they cannot be moved.
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
        except NotImplementedError:
            _logger.warning(
                "sparse balance: %s: no locks on this file system; nothing keeps a second run from "
                "writing there",
                self.path,
            )

    def _error(self, problem: str) -> LogDirectoryError:
        return LogDirectoryError(f"{flag_name('log_dir')} {self.path}: {problem}")
