# SPDX-License-Identifier: Apache-2.0
"""One of two training runs that take steps alternately, so that both meet the same disturbances.

    torchrun ... benchmarks/alternating_run.py DIRECTORY first FLAGS...
    torchrun ... benchmarks/alternating_run.py DIRECTORY second FLAGS...

FLAGS are those of ``sparsebalance_megatron.pretrain_gpt``. Rank r of one run meets rank r of the
other at a socket in DIRECTORY, so both run on the same hosts. The run's clock stands still while
the other run trains a step: no time in its logs contains one. Megatron's own log lines do.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

MEETING_TIMEOUT_S = 600.0
_RETRY_S = 0.1
_TURN = b"t"


class PausedClock:
    """Seconds of ``clock``, without those spent in :meth:`paused`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float | None, float] = (None, 0.0)
        """When it was stopped, if it stands, and the pauses so far; one value for all threads."""

    def __call__(self) -> float:
        stopped_at_s, paused_s = self._state
        return (self._clock() if stopped_at_s is None else stopped_at_s) - paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        began_s, paused_s = self._clock(), self._state[1]
        self._state = (began_s, paused_s)
        yield
        self._state = (None, paused_s + self._clock() - began_s)


class Alternation:
    """One rank's connection to the same rank of the other run.

    Args:
        directory: that both runs name; made where it is missing.
        begins: whether this run trains the first step.
        timeout_s: how long to wait for the other run to start.
    """

    def __init__(
        self, directory: Path, rank: int, *, begins: bool, timeout_s: float = MEETING_TIMEOUT_S
    ) -> None:
        self._path = directory / f"rank-{rank:05d}"
        self._begins = begins
        self._timeout_s = timeout_s
        self._other: socket.socket | None = None

    def meet(self) -> None:
        """Connect to the other run; where that one begins, wait for its first step.

        Raises:
            TimeoutError: the other run did not come in time.
        """
        if self._begins:
            self._other = self._accept()
        else:
            self._other = self._connect()
            self._wait()

    def hand_over(self) -> None:
        """Let the other run train a step, and wait until it has; return at once if it has ended."""
        if self._other is None:
            return
        try:
            self._other.sendall(_TURN)
        except OSError:
            self.close()
        else:
            self._wait()

    def close(self) -> None:
        """Leave; the other run goes on alone."""
        if self._other is not None:
            self._other.close()
            self._other = None

    def _wait(self) -> None:
        assert self._other is not None
        try:
            received = self._other.recv(1)
        except OSError:
            received = b""
        if not received:
            self.close()

    def _accept(self) -> socket.socket:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._path))
            listening.settimeout(self._timeout_s)
            listening.listen(1)
            other, _ = listening.accept()
        self._path.unlink(missing_ok=True)
        other.settimeout(None)
        return other

    def _connect(self) -> socket.socket:
        until_s = time.monotonic() + self._timeout_s
        while True:
            other = socket.socket(socket.AF_UNIX)
            try:
                other.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                # The first run is not there yet, or left a socket behind when it was killed.
                other.close()
                if time.monotonic() > until_s:
                    raise TimeoutError(
                        f"{self._path}: no other run came within {self._timeout_s:.0f} s; start "
                        "both, one as first and one as second, on as many ranks"
                    ) from None
                time.sleep(_RETRY_S)
            else:
                return other


def around_every_step(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Run Megatron's ``train_step``, which its loop looks up at every step, within ``around()``."""
    from megatron.training import training

    train_step: Callable[..., Any] = training.train_step

    @wraps(train_step)
    def step(*arguments: Any, **keywords: Any) -> Any:
        with around():
            return train_step(*arguments, **keywords)

    training.train_step = step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", help="where the two runs meet")
    parser.add_argument("place", choices=("first", "second"), help="first in one run only")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of pretrain_gpt")
    arguments = parser.parse_args()
    directory, place, flags = arguments.directory, arguments.place, arguments.flags
    clock = PausedClock(time.perf_counter)
    time.perf_counter = clock
    # The package takes its clock when it is imported.
    from sparsebalance_megatron import pretrain_gpt
    from sparsebalance_megatron.megatron.arguments import early_flags

    _, device_type = early_flags(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    # With the CPU adapter in place a CUDA device seems to be visible.
    flags += ["--sparse-balance-device", device_type]
    sys.argv = [sys.argv[0], *flags]
    alternation = Alternation(Path(directory), int(os.environ["RANK"]), begins=place == "first")
    met = False

    @contextmanager
    def step() -> Iterator[None]:
        nonlocal met
        if not met:
            alternation.meet()
            met = True
        yield
        with clock.paused():
            alternation.hand_over()

    around_every_step(step)
    pretrain_gpt.main(flags)


if __name__ == "__main__":
    main()
