# SPDX-License-Identifier: Apache-2.0
"""One message when training ends by an error: which rank, by what, and what to go on from.

A rank that fails takes the others down with it, each with a traceback of its own, most of which
only say that somebody did not answer. So every rank that ends leaves a word in a store that
outlives the collectives, and the first of them tells what all words together say.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from sparsebalance_megatron.training.resume import resume_advice

QUIET_S = 6.0
"""Nobody else has left a word for so long: the others hang, or wait for who did."""
LONGEST_WAIT_S = 20.0
_POLL_S = 0.2
_CONNECTION_S = 5.0
_RANKS_SHOWN = 8
_COUNT, _TOLD = "count", "told"
_WAITED = re.compile(r"gloo|nccl|timed out waiting|connection (closed|reset)", re.IGNORECASE)
"""What errors of collectives say, wherever in Python they were waited for."""


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """What one rank ended by.

    ``waited`` is true of errors that only say that another rank did not answer. ``iteration`` is
    as Megatron prints it, and 0 before the first.
    """

    rank: int
    host: str
    iteration: int
    error: str
    waited: bool


def last_word(error: BaseException, args: Namespace) -> LastWord:
    """This rank's."""
    first_line = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return LastWord(
        rank=args.rank,
        host=socket.gethostname(),
        iteration=getattr(args, "curr_iteration", -1) + 1,
        error=f"{name}: {first_line}" if first_line else name,
        waited=_waited_for_others(error),
    )


def describe(words: Sequence[LastWord], world_size: int) -> str:
    """What the words of some ranks, in the order in which they were left, say of all."""
    first = next((word for word in words if not word.waited), words[0])
    when = f"in iteration {first.iteration}" if first.iteration else "before the first iteration"
    ended = f"rank {first.rank} on {first.host} ended {when} by {first.error}"
    if not first.waited:
        alike = [word.rank for word in words if word.error == first.error and word != first]
        return f"{ended} (so did {_ranks(alike)})" if alike else ended
    silent = sorted(set(range(world_size)) - {word.rank for word in words})
    if not silent:
        return f"{ended}; every rank ended waiting for another: look at the network"
    return (
        f"no word from {_ranks(silent)}, which hang, were killed, or cannot be reached; {ended}, "
        "waiting for others"
    )


@contextmanager
def last_words(
    args: Namespace, open_store: Callable[[], Store] | None = None, quiet_s: float = QUIET_S
) -> Iterator[None]:
    """Where training ends by an error, one rank says why and what to go on from.

    The error goes its way afterwards. Interruptions and exits need no words.

    Args:
        open_store: connects to where words are left; None takes the store that torchrun's
            environment names.
        quiet_s: how long the first rank waits for further words after each.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # as PyTorch's CheckpointException is, without being more
        word = last_word(error, args)
        words = _words_of_all(word, args.world_size, open_store or _open_store, quiet_s)
        if words:
            print(f"sparse balance: {describe(words, args.world_size)}", file=sys.stderr)
            if args.save and not isinstance(error, ValueError):
                print(f"sparse balance: {resume_advice(Path(args.save))}", file=sys.stderr)
            sys.stderr.flush()
        raise


def _words_of_all(
    word: LastWord, world_size: int, open_store: Callable[[], Store], quiet_s: float
) -> list[LastWord]:
    """On the rank whose word came first, all words; on the others none, once that one has told.

    A rank that cannot reach the store tells of itself.
    """
    if world_size == 1:
        return [word]
    try:
        store = open_store()
        place = store.add(_COUNT, 1)
        store.set(f"word/{place}", json.dumps(asdict(word)))
        if place > 1:
            _wait(lambda: store.check([_TOLD]), LONGEST_WAIT_S + quiet_s)
            return []
        words = _collect(store, world_size, quiet_s)
        store.set(_TOLD, "")
    except (RuntimeError, ValueError) as error:  # the host that serves the store is gone, say
        reason = str(error).strip().partition("\n")[0]
        print(f"sparse balance: other ranks cannot be asked: {reason}", file=sys.stderr)
        return [word]
    return words


def _collect(store: Store, world_size: int, quiet_s: float) -> list[LastWord]:
    """Words in order, until all have come or none comes any more."""
    began = heard = time.monotonic()
    count = 1
    while count < world_size and time.monotonic() - began < LONGEST_WAIT_S:
        if (now := store.add(_COUNT, 0)) > count:
            count, heard = now, time.monotonic()
        elif time.monotonic() - heard > quiet_s:
            break
        time.sleep(_POLL_S)
    return [LastWord(**json.loads(store.get(f"word/{place + 1}"))) for place in range(count)]


def _wait(met: Callable[[], bool], longest_s: float) -> None:
    began = time.monotonic()
    while not met() and time.monotonic() - began < longest_s:
        time.sleep(_POLL_S)


def _open_store() -> Store:
    """A connection of its own to the store of torchrun's rendezvous; keys of this attempt."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_CONNECTION_S),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"sparse_balance/last_words/{attempt}", store)


def _waited_for_others(error: BaseException) -> bool:
    if isinstance(error, DistError):
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
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
