# SPDX-License-Identifier: Apache-2.0
"""Two runs that take steps in turn, so that what disturbs the machine disturbs both.

Every rank of one run meets the same rank of the other over a socket of the file system, so both
must run on the same hosts. Whoever has the turn trains one step, from the end of a step to the end
of the next, and hands it over; the other waits, and its clocks leave the waiting out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Side = Literal["first", "second"]

MEETING_TIMEOUT_S = 600.0
_RETRY_S = 0.1
_TURN = b"t"


class TurnsError(ValueError):
    """The other run did not come."""


def parse_turns(flag: str) -> tuple[Path, Side]:
    """The parts of ``--sparse-balance-in-turn``, which the configuration has checked."""
    directory, _, side = flag.rpartition(":")
    return Path(directory), "first" if side == "first" else "second"


class Turns:
    """One rank's side of the exchange.

    Args:
        directory: that both runs name; made where it is missing.
        side: the first run begins.
        world_rank: meets the same rank of the other run.
        timeout_s: how long to wait for the other run to come.
        say: told, once, when the other run has ended and this one goes on alone.
    """

    def __init__(
        self,
        directory: Path,
        side: Side,
        *,
        world_rank: int,
        timeout_s: float = MEETING_TIMEOUT_S,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._path = directory / f"rank-{world_rank:05d}"
        self._side = side
        self._timeout_s = timeout_s
        self._say = say
        self._other: socket.socket | None = None

    def meet(self) -> None:
        """Wait for the other run, and in the second for the first turn.

        Raises:
            TurnsError: it did not come in time, or the directory cannot hold sockets.
        """
        try:
            if self._side == "first":
                self._other = self._accept()
            else:
                self._other = self._connect()
        except TimeoutError:
            raise TurnsError(
                f"{self._path}: no other run came within {self._timeout_s:.0f} s; start both, one "
                "with --sparse-balance-in-turn DIR:first and one with DIR:second, on as many ranks"
            ) from None
        except OSError as error:
            raise TurnsError(f"{self._path}: {error.strerror or error}") from error
        if self._side == "second":
            self._wait()

    def hand_over(self) -> None:
        """Give the turn to the other run, and wait until it comes back."""
        if self._other is None:
            return
        try:
            self._other.sendall(_TURN)
        except OSError:
            self._go_on_alone()
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
            self._go_on_alone()

    def _go_on_alone(self) -> None:
        if self._other is not None:
            self.close()
            self._say("sparse balance: the other run has ended; this one no longer takes turns")

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
                    raise TimeoutError from None
                time.sleep(_RETRY_S)
            else:
                return other
