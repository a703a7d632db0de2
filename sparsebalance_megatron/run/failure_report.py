# SPDX-License-Identifier: Apache-2.0
"""Prints one report when training ends by an error: which rank failed first, why, what to resume.

A rank that fails takes the others down with it, and their tracebacks only say that another rank did
not answer. So every failing rank writes its error to the store of torchrun's rendezvous, which
outlives collectives, and the first of them prints what all errors together say.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.checkpoint import CheckpointException

from sparsebalance_megatron.errors import place_and_reason
from sparsebalance_megatron.megatron.compat import (
    last_saved_iteration,
    not_finite_statuses,
    saves_for_another_try,
)
from sparsebalance_megatron.run.agreement import shown
from sparsebalance_megatron.text_table import one_line

QUIET_S = 6.0
"""Time without another error after which the ranks that are silent count as hung or killed."""
LONGEST_WAIT_S = 20.0
_POLL_S = 0.2
_CONNECTION_S = 5.0
_COUNT, _REPORTED = "count", "reported"
_WAITED = re.compile(r"gloo|nccl|timed out waiting|connection (closed|reset)", re.IGNORECASE)
"""What errors of collectives say, whichever line of Python waited for them."""
_SET_TO = "to an interface of this node (`ip -brief address` lists them)"
_REMEDIES = {
    f"set GLOO_SOCKET_IFNAME {_SET_TO}": r"gloo/transport/tcp/device|hostname to a \(local\) addr",
    f"set NCCL_SOCKET_IFNAME {_SET_TO}": r"no socket interface found",
    "raise the limit of this process (ulimit -n)": "too many open files",
    "free some of that disk": "no space left on device|disk quota exceeded",
}
"""What to do -> what is said where that helps; such an error does not come of another rank."""


class Terminated(BaseException):
    """SIGTERM came. torchrun sends it to the ranks that are left when one has ended."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that ended one rank in an iteration, 0 before the first.

    ``waited``: whether it only says that another rank did not answer.
    """

    rank: int
    host: str
    iteration: int
    error: str
    waited: bool


def failure_of(error: BaseException, rank: int, iteration: int) -> Failure:
    """The failure of this rank."""
    waited = _waited_for_others(error)
    if isinstance(error, CheckpointException):
        # It only lists the ranks where there is another error, or none where that came late.
        waited |= not error.failures
        error, _ = next(iter(error.failures.values()), (error, None))
    place, reason = place_and_reason(error)
    name = type(error).__name__
    if isinstance(error, Terminated):
        reason = ""  # its source line would say where the signal is handled
    if isinstance(error, AssertionError) and place:
        name = f"{name} ({place})"
    if remedy := _remedy_of(error):
        reason += f"; {remedy}"
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        iteration=iteration,
        error=f"{name}: {reason}" if reason else name,
        waited=waited,
    )


def describe(failures: Sequence[Failure], world_size: int) -> str:
    """One line about all ranks, from the failures of some of them in the order of time."""
    first = next((failure for failure in failures if not failure.waited), failures[0])
    when = f"in iteration {first.iteration}" if first.iteration else "before the first iteration"
    ended = f"rank {first.rank} on {first.host} ended {when} by {first.error}"
    if not first.waited:
        alike = [each.rank for each in failures if each.error == first.error and each != first]
        return f"{ended} (so did {_ranks(alike)})" if alike else ended
    silent = sorted(set(range(world_size)) - {failure.rank for failure in failures})
    if not silent and failures[0].error == Terminated.__name__:
        return ended
    if not silent:
        return f"{ended}; every rank ended in a collective: look at the network"
    if all(failure.error == Terminated.__name__ for failure in failures):
        told = _ranks([failure.rank for failure in failures])
        return (
            f"SIGTERM came to {told} in iteration {first.iteration}; nothing was heard from "
            f"{_ranks(silent)} (ended before, hanging, or waiting for them)"
        )
    return (
        f"nothing was heard from {_ranks(silent)} (hanging, killed, or out of reach); {ended}, "
        "waiting for others"
    )


@contextmanager
def failure_report(
    *,
    rank: int,
    world_size: int,
    save: str | None,
    iteration: Callable[[], int],
    open_store: Callable[[], Store] | None = None,
    quiet_s: float = QUIET_S,
) -> Iterator[None]:
    """Have one rank report an error that ends training, or SIGTERM, and then go on with it.

    KeyboardInterrupt and SystemExit are not reported, but for the status with which Megatron ends
    where a loss or gradient is not finite. Without ``save`` it fails on the way to that status, as
    it cannot save; the run ends with the same line and status.

    ``iteration`` gives the one that runs, as Megatron prints it, 0 before the first; the first rank
    waits ``quiet_s`` for further failures after each.
    """
    reports = False

    def name_not_finite() -> None:
        if rank == 0:
            print(
                f"sparse balance: Megatron ended training in iteration {iteration()} because a "
                "loss or gradient was NaN or infinite; its lines above name the rank and the "
                "place. Lower --lr, or look at that step's samples, before resuming",
                file=sys.stderr,
                flush=True,
            )

    def terminate(signal_number: int, frame: FrameType | None) -> None:
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
            name_not_finite()
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # PyTorch's CheckpointException is no Exception
        reports = True
        if saves_for_another_try():
            name_not_finite()
            if not save:
                raise SystemExit(not_finite_statuses()[0]) from None
        failure = failure_of(error, rank, iteration())
        failures = _all_failures(failure, world_size, open_store or _open_store, quiet_s)
        if failures:
            told = one_line(describe(failures, world_size))
            print(f"sparse balance: {told}", file=sys.stderr)
            if save and not isinstance(error, ValueError):
                print(f"sparse balance: {resume_advice(Path(save))}", file=sys.stderr)
            sys.stderr.flush()
        if isinstance(error, Terminated):
            # An orderly exit ends Megatron's checkpoint writers, which SIGTERM would leave behind.
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _all_failures(
    failure: Failure, world_size: int, open_store: Callable[[], Store], quiet_s: float
) -> list[Failure]:
    """All failures on the rank that failed first; none on others, once that one has reported; a
    rank's own where it cannot reach the store."""
    if world_size == 1:
        return [failure]
    try:
        store = open_store()
        place = store.add(_COUNT, 1)
        store.set(f"failure/{place}", json.dumps(asdict(failure)))
        if place > 1:
            # No longer than that, nor after the rank that serves the store has ended.
            with suppress(RuntimeError):
                store.wait([_REPORTED], timedelta(seconds=LONGEST_WAIT_S + quiet_s))
            return []
        failures = _collect(store, world_size, quiet_s)
        store.set(_REPORTED, "")
    except (KeyError, RuntimeError, ValueError) as error:  # no torchrun, or its host is gone, say
        reason = str(error).strip().partition("\n")[0]
        print(one_line(f"sparse balance: other ranks cannot be asked: {reason}"), file=sys.stderr)
        return [failure]
    return failures


def _collect(store: Store, world_size: int, quiet_s: float) -> list[Failure]:
    """Failures in the order of time, until all have come or no more come."""
    began = heard = time.monotonic()
    count = 1
    while count < world_size and time.monotonic() - began < LONGEST_WAIT_S:
        if (now := store.add(_COUNT, 0)) > count:
            count, heard = now, time.monotonic()
        elif time.monotonic() - heard > quiet_s:
            break
        time.sleep(_POLL_S)
    return [Failure(**json.loads(store.get(f"failure/{place + 1}"))) for place in range(count)]


def _open_store() -> Store:
    """A separate connection to the store of torchrun's rendezvous; keys of this attempt."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_CONNECTION_S),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"sparse_balance/failures/{attempt}", store)


def _remedy_of(error: BaseException) -> str | None:
    """What helps against an error, where its text tells."""
    said = str(error)
    return next((do for do, text in _REMEDIES.items() if re.search(text, said, re.I)), None)


def _waited_for_others(error: BaseException) -> bool:
    if _remedy_of(error):
        return False
    if isinstance(error, DistError | Terminated):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    inside = str(Path(torch.distributed.__file__).parent)
    in_collective = trace is not None and trace.tb_frame.f_code.co_filename.startswith(inside)
    return isinstance(error, RuntimeError) and (
        in_collective or _WAITED.search(str(error)) is not None
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {shown(ranks)}"


def resume_advice(save: Path) -> str:
    """Say what a run that saves to ``save``, and was ended by an error, can resume from."""
    iteration = last_saved_iteration(str(save))
    if iteration is None and not save.exists():
        return f"there is no complete checkpoint in {save}"
    disk = shutil.disk_usage(save)
    free = f"with {disk.free / 1e9:.1f} GB free there"
    if disk.free < min(disk.total / 100, 1e9):  # writers of checkpoints hide the error
        free += " (that disk is full: free some of it, or name another by --save)"
    if iteration is None:
        return f"there is no complete checkpoint in {save}, {free}"
    return (
        f"the last complete checkpoint in {save} is of iteration {iteration}, {free}; mend the "
        f"cause and resume with --load {save}"
    )
