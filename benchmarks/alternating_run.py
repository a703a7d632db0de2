# SPDX-License-Identifier: Apache-2.0
"""One of several training runs that take steps in turn, so that all meet the same disturbances.

    torchrun ... benchmarks/alternating_run.py DIRECTORY 0 3 FLAGS...
    torchrun ... benchmarks/alternating_run.py DIRECTORY 1 3 FLAGS...
    torchrun ... benchmarks/alternating_run.py DIRECTORY 2 3 FLAGS...

FLAGS are those of ``sparsebalance_megatron.pretrain_gpt``. All runs take equally many steps, on as
many ranks. Rank r of a run hands over to rank r of the next one at a socket in DIRECTORY, so all
run on the same hosts. The run's clock stands still while the others train a step: no time in its
logs contains one. Megatron's own log lines do.
"""

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
    """One rank's connections to the same rank of the run before and of the run after.

    Args:
        directory: that all runs name; made where it is missing.
        place: of this run among all, from 0; the first one trains the first step.
        runs: how many take turns.
        timeout_s: how long to wait for the other runs to start.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        place: int,
        runs: int,
        timeout_s: float = MEETING_TIMEOUT_S,
    ) -> None:
        self._own_path, self._next_path = (
            directory / f"run-{number}-rank-{rank:05d}" for number in (place, (place + 1) % runs)
        )
        self._begins = place == 0
        self._timeout_s = timeout_s
        self._before: socket.socket | None = None
        self._after: socket.socket | None = None

    def meet(self) -> None:
        """Connect to both runs; the first run returns at once, the others when it is their turn.

        Raises:
            TimeoutError: another run did not come in time.
        """
        self._own_path.parent.mkdir(parents=True, exist_ok=True)
        self._own_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._own_path))
            listening.settimeout(self._timeout_s)
            listening.listen(1)
            self._after = self._connect()
            self._before, _ = listening.accept()
        self._own_path.unlink(missing_ok=True)
        self._before.settimeout(None)
        if not self._begins:
            self._wait()

    def hand_over(self) -> None:
        """Let the other runs train a step, and wait until they have; return at once where the run
        before has ended."""
        if self._after is not None:
            try:
                self._after.sendall(_TURN)
            except OSError:
                self._after.close()
                self._after = None
        self._wait()

    def _wait(self) -> None:
        if self._before is None:
            return
        try:
            received = self._before.recv(1)
        except OSError:
            received = b""
        if not received:
            self._before.close()
            self._before = None

    def _connect(self) -> socket.socket:
        until_s = time.monotonic() + self._timeout_s
        while True:
            other = socket.socket(socket.AF_UNIX)
            try:
                other.connect(str(self._next_path))
            except (FileNotFoundError, ConnectionRefusedError):
                # That run is not there yet, or left a socket behind when it was killed.
                other.close()
                if time.monotonic() > until_s:
                    raise TimeoutError(
                        f"{self._next_path}: no run came within {self._timeout_s:.0f} s; start all "
                        "of them, each with its place, on as many ranks"
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
    parser.add_argument("directory", type=Path, help="where the runs meet")
    parser.add_argument("place", type=int, help="of this run among all, from 0")
    parser.add_argument("runs", type=int, help="how many take turns")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of pretrain_gpt")
    arguments = parser.parse_args()
    flags = arguments.flags
    clock = PausedClock(time.perf_counter)
    time.perf_counter = clock
    # The package takes its clock when it is imported.
    from sparsebalance_megatron import pretrain_gpt
    from sparsebalance_megatron.megatron.arguments import device_type_of

    device_type = device_type_of(flags)
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    # With the CPU adapter in place a CUDA device seems to be visible.
    flags += ["--sparse-balance-device", device_type]
    sys.argv = [sys.argv[0], *flags]
    alternation = Alternation(
        arguments.directory, int(os.environ["RANK"]), place=arguments.place, runs=arguments.runs
    )
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
