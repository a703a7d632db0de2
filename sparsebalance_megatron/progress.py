# SPDX-License-Identifier: Apache-2.0
"""How far a long computation is: a bar with the time left, or lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_FIRST_SECONDS = 5.0
_BAR_SECONDS, _LINE_SECONDS = 0.2, 10.0
_BAR_CHARACTERS = 24


class Progress:
    """Called after each of ``total`` parts, says on standard error how many are done and about how
    long the others take: after five seconds, as a bar on a terminal, or else in a line every ten
    seconds.
    """

    def __init__(
        self,
        name: str,
        total: int,
        parts: str = "steps",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._parts, self._done = name, total, parts, 0
        self._stream, self._clock = sys.stderr if stream is None else stream, clock
        self._started = clock()
        self._shown: float | None = None

    def __call__(self) -> None:
        self._done += 1
        now = self._clock()
        seconds, is_terminal = now - self._started, self._stream.isatty()
        since_shown = seconds if self._shown is None else now - self._shown
        pause = _BAR_SECONDS if is_terminal else _LINE_SECONDS
        if self._shown is None:
            pause = _FIRST_SECONDS
        if since_shown < pause:
            return
        self._shown = now
        share = min(1.0, self._done / self._total)
        left = seconds / share - seconds
        text = f"{self._name}: {self._done} of {self._total} {self._parts}, {_duration(left)} left"
        if is_terminal:
            filled = round(share * _BAR_CHARACTERS)
            bar = "#" * filled + "." * (_BAR_CHARACTERS - filled)
            self._stream.write(f"\r{text} [{bar}]\x1b[K")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._shown is not None and self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    """In words short enough for a bar."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
