# SPDX-License-Identifier: Apache-2.0
"""Writes logs on a thread of its own, so that training never waits for a disk."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable

from sparsebalance_megatron.log.log_file import JsonLinesFile
from sparsebalance_megatron.log.records import Header, Record

_MAX_QUEUED = 64
_CLOSE_TIMEOUT_S = 10.0

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs in order on one thread, until the process ends or :meth:`close`.

    A process forked from this one has no such thread: it takes no jobs, and leaves those queued to
    its parent.

    Args:
        max_queued: jobs that may wait.
    """

    def __init__(self, *, max_queued: int = _MAX_QUEUED) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(max_queued)
        self._process = os.getpid()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="sparse-balance-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, job: Callable[[], None]) -> bool:
        """Whether the job was taken; it is not where too many wait."""
        if not self._open or os.getpid() != self._process:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Do what is queued, for as long as ``timeout_s``, and take no more."""
        if not self._open or os.getpid() != self._process:
            return
        self._open = False
        atexit.unregister(self.close)
        try:
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.warning(
                "sparse balance: logs: the disk took longer than %g s; the last lines are lost",
                timeout_s,
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _logger.exception("sparse balance: logs: a line could not be made and is left out")


class BackgroundLog:
    """A log file whose lines are made and written by a :class:`BackgroundWriter`."""

    def __init__(self, file: JsonLinesFile, writer: BackgroundWriter) -> None:
        self._file = file
        self._writer = writer

    def begin(self, header: Header, *, resumed: bool) -> None:
        """See :meth:`.log_file.JsonLinesFile.begin`."""
        self._submit(lambda: self._file.begin(header, resumed=resumed))

    def append(self, make_record: Callable[[], Record]) -> None:
        """Queue a line, made there from what no longer changes; drop and count it if too many
        wait."""
        self._submit(lambda: self._file.append(make_record()))

    def _submit(self, job: Callable[[], None]) -> None:
        if not self._writer.submit(job):
            self._file.count_dropped()
