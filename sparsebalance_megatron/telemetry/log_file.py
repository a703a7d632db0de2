# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that never grows beyond a size and never stops a run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.telemetry.jsonl import LINES_DISCARDED, LINES_DROPPED, older_file

DEFAULT_MAX_BYTES = 64 * 10**6
_READ_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


class JsonLinesFile:
    """Appends records to ``NAME.jsonl``, the oldest of which it forgets.

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
        self.older_path = older_file(self.path)
        self._half_bytes = max_bytes // 2
        self._descriptor: int | None = None
        self._header: dict[str, Any] = {}
        self._header_bytes = 0
        self._header_due = False
        self._line_is_cut = False
        self._bytes = self._lines = self._older_lines = self._discarded = 0
        # The queue's thread counts the first, the writing thread the others.
        self._never_queued = self._not_written = self._reported = 0
        self._warned = False

    def begin(self, header: Mapping[str, Any], *, resumed: bool) -> None:
        """Write the header: of a new file, or behind what a run left that this one resumes."""
        self._header = dict(header)
        self._header_bytes = len(_line({**header, LINES_DISCARDED: 10**12}))
        self._header_due = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resumed:
                self._take_over()
            else:
                for path in (self.path, self.older_path):
                    path.unlink(missing_ok=True)
            self._write(b"")
        except OSError as error:
            self._fail(error)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinity become null."""
        lost = self._never_queued + self._not_written - self._reported
        line = _line({**record, LINES_DROPPED: lost} if lost else record)
        try:
            self._write(line)
        except OSError as error:
            self._not_written += 1
            self._fail(error)
        else:
            self._reported += lost

    def count_dropped(self) -> None:
        """Count a line that was given up before it came here; from one thread, any one."""
        self._never_queued += 1
        self._warn("the disk is slower than training; lines are left out and counted")

    def close(self) -> None:
        """Give the file back; a later line opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_over(self) -> None:
        self._older_lines, _, _ = _survey(self.older_path)
        self._lines, self._line_is_cut, first = _survey(self.path)
        with suppress(ValueError, AttributeError):
            self._discarded = int(json.loads(first).get(LINES_DISCARDED, 0))

    def _write(self, line: bytes) -> None:
        """The header where it is due, and the line."""
        if self._header_bytes + len(line) > self._half_bytes:
            raise OSError(errno.EFBIG, f"a line of {len(line)} bytes exceeds half of the log")
        descriptor = self._opened()
        text = self._text(line)
        if self._bytes and self._bytes + len(text) > self._half_bytes:
            descriptor = self._begun_anew()
            text = self._text(line)
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, self._bytes)
            raise
        self._bytes += len(text)
        self._lines += text.count(b"\n")
        self._header_due = self._line_is_cut = False

    def _text(self, line: bytes) -> bytes:
        discarded = {LINES_DISCARDED: self._discarded} if self._discarded else {}
        header = _line({**self._header, **discarded}) if self._header_due else b""
        return (b"\n" if self._line_is_cut else b"") + header + line

    def _opened(self) -> int:
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.path, flags, 0o644)
            self._bytes = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _begun_anew(self) -> int:
        self.close()
        os.replace(self.path, self.older_path)
        self._discarded += self._older_lines
        self._older_lines, self._lines = self._lines, 0
        self._header_due, self._line_is_cut = True, False
        return self._opened()

    def _fail(self, error: OSError) -> None:
        with suppress(OSError):
            self.close()
        self._warn(f"{error.strerror or error}; lines are left out and counted until it works")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning("sparse balance: log %s: %s", self.path, reason)


def _survey(path: Path) -> tuple[int, bool, bytes]:
    """(number of whole lines, whether a last one is cut off, first line)."""
    try:
        with path.open("rb") as stream:
            first = stream.readline(_READ_BYTES)
            lines, last = first.count(b"\n"), first
            while part := stream.read(_READ_BYTES):
                lines, last = lines + part.count(b"\n"), part
    except FileNotFoundError:
        return 0, False, b""
    return lines, bool(last) and not last.endswith(b"\n"), first


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = _json(record)
    except ValueError:
        text = _json(_finite(record))
    return text.encode() + b"\n"


def _json(record: Any) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not go into a log")


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
