# SPDX-License-Identifier: Apache-2.0
"""Says why training ended, where torchrun does not: beside a rank that hangs, where a loss is not
finite, and what to resume.

torchrun names the process that ended first. A rank that hangs ends last, and errors of the others
only say that somebody did not answer. So failing ranks meet in the store of the process groups,
which outlives collectives, and one of them prints a line.
"""

import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, Store
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from sparsebalance_megatron.errors import place_and_reason
from sparsebalance_megatron.megatron.compat import (
    last_saved_iteration,
    not_finite_statuses,
    saves_for_another_try,
)
from sparsebalance_megatron.run.agreement import shown
from sparsebalance_megatron.text_table import one_line

WAIT_S = 10.0
"""Time after which ranks count as hung or killed that have not failed, when another one has."""
_POLL_S = 0.2
_ENDED, _CAUSES, _ECHOES, _TOLD = (
    f"sparse_balance/{name}" for name in ("ended", "causes", "echoes", "told")
)
_ECHO = re.compile(r"gloo|nccl|timed out waiting|connection (closed|reset)", re.IGNORECASE)
"""What errors of collectives say that wait for another rank."""
_REMEDIES = {
    r"gloo/transport/tcp/device|hostname to a \(local\) addr": "set GLOO_SOCKET_IFNAME",
    "no socket interface found": "set NCCL_SOCKET_IFNAME",
    "too many open files": "raise the limit of this process (ulimit -n)",
    "no space left on device|disk quota exceeded": "free some of that disk",
}
"""What is said -> what helps; no such error comes of another rank."""


class Terminated(BaseException):
    """SIGTERM came. torchrun sends it to the ranks that are left when one has ended."""


@contextmanager
def failure_report(
    *,
    rank: int,
    world_size: int,
    save: str | None,
    iteration: Callable[[], int],
    store: Callable[[], Store] = _get_default_store,
    wait_s: float = WAIT_S,
) -> Iterator[None]:
    """Have one rank report an error that ends training, or SIGTERM, and then go on with it.

    KeyboardInterrupt and SystemExit are not reported, but for the status with which Megatron ends
    where a loss or gradient is not finite. Without ``save`` it fails on the way to that status, as
    it cannot save; the run ends with the same line and status.

    ``iteration`` gives the one that runs, as Megatron prints it, 0 before the first.
    """
    reports = False

    def terminate(signal_number: int, frame: object) -> None:
        if not reports:
            raise Terminated

    handles = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if handles:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except SystemExit as ended:
        if ended.code in not_finite_statuses():
            _say_not_finite(rank, iteration())
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # PyTorch's CheckpointException is no Exception
        reports = True
        if saves_for_another_try():
            _say_not_finite(rank, iteration())
            if not save:
                raise SystemExit(not_finite_statuses()[0]) from None
        when = f"in iteration {iteration()}" if iteration() else "before the first iteration"
        text, is_echo = described(error)
        ended_by = f"rank {rank} on {socket.gethostname()} ended {when} by {text}"
        if told := _told(ended_by, is_echo, rank, world_size, store, wait_s):
            _say(told)
            if save and not isinstance(error, ValueError):
                _say(resume_advice(Path(save)))
        if isinstance(error, Terminated):
            # An orderly exit ends Megatron's checkpoint writers, which SIGTERM would leave behind.
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _say(line: str) -> None:
    print(one_line(f"sparse balance: {line}"), file=sys.stderr, flush=True)


def _say_not_finite(rank: int, iteration: int) -> None:
    if rank == 0:
        _say(
            f"Megatron ended training in iteration {iteration} because a loss or gradient was NaN "
            "or infinite; its lines above name the rank and the place. Lower --lr, or look at that "
            "step's samples, before resuming"
        )


def described(error: BaseException) -> tuple[str, bool]:
    """An error as one line, with what helps, and whether it is an echo: it only says that another
    rank did not answer."""
    if isinstance(error, Terminated):
        return "SIGTERM", True
    if isinstance(error, CheckpointException):
        # It lists no error where that of another rank came late.
        error = next((each for each, _ in error.failures.values()), DistError(str(error)))
    text = ": ".join(filter(None, (type(error).__name__, place_and_reason(error)[1])))
    for said, remedy in _REMEDIES.items():
        if re.search(said, str(error), re.IGNORECASE):
            return f"{text}; {remedy}", False
    waited = isinstance(error, RuntimeError) and _ECHO.search(str(error))
    return text, bool(waited) or isinstance(error, DistError)


def _told(
    ended: str,
    is_echo: bool,
    rank: int,
    world_size: int,
    open_store: Callable[[], Store],
    wait_s: float,
) -> str | None:
    """What to say: the first rank with a cause says it, else the first with an echo names the ranks
    that are silent. Every rank speaks where it cannot reach the store."""
    if world_size == 1:
        return ended
    try:
        store = open_store()
        store.set(f"{_ENDED}/{rank}", "")
        is_first = store.add(_ECHOES if is_echo else _CAUSES, 1) == 1
        if not is_echo:
            return ended if is_first else None
        if not is_first:
            # torchrun ends all ranks when one has ended, or this one serves the store.
            with suppress(RuntimeError):
                store.wait([_TOLD], timedelta(seconds=2 * wait_s))
            return None
        silent, until = list(range(world_size)), time.monotonic() + wait_s
        while silent and time.monotonic() < until and not store.add(_CAUSES, 0):
            time.sleep(_POLL_S)
            silent = [each for each in silent if not store.check([f"{_ENDED}/{each}"])]
        has_cause = store.add(_CAUSES, 0) > 0
        store.set(_TOLD, "")
    except (RuntimeError, ValueError):  # no process groups yet, or their host is gone
        return ended
    if has_cause:
        return None
    if silent:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {shown(silent)}"
        return f"nothing was heard from {ranks} (hanging, killed, or out of reach); {ended}"
    return f"{ended}; all ranks waited for others, or got SIGTERM: look at the network"


def resume_advice(save: Path) -> str:
    """Say what a run that saves to ``save``, and was ended by an error, can resume from."""
    iteration = last_saved_iteration(str(save))
    advice = f"there is no complete checkpoint in {save}"
    if iteration is not None:
        advice = (
            f"the last complete checkpoint in {save} is of iteration {iteration}; mend the cause "
            f"and resume with --load {save}"
        )
    if save.exists():
        disk = shutil.disk_usage(save)
        if disk.free < min(disk.total / 100, 1e9):  # writers of checkpoints hide the error
            advice += " (that disk is full: free some of it, or name another by --save)"
    return advice
