# SPDX-License-Identifier: Apache-2.0
"""One attempt at a run on forked ranks, watched from outside until it ends or is killed."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from forked_ranks import cpu_environment, run_ranks

POLL_S = 0.25
_LONGEST_S = 24 * 3600.0
_WRITERS_END_IN_S = 10.0
"""Megatron's checkpoint writers end by themselves in a moment."""
RANK = Path(__file__).with_name("rank.py")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the ranks of an attempt held at one moment, the largest of them."""

    step: int
    resident_megabytes: float
    threads: int
    open_files: int


@dataclass(kw_only=True)
class Attempt:
    """What an attempt did: it began after ``first_step`` and logged up to ``last_step``.

    ``ended`` is "finished", "killed", "failed" or "hung"; ``orphans`` counts processes that it left
    behind.
    """

    disturbance: str
    first_step: int
    last_step: int = 0
    ended: str = ""
    seconds: float = 0.0
    usage: list[Usage] = field(default_factory=list)
    orphans: int = 0


def run(
    attempt: Attempt,
    flags: Sequence[str],
    *,
    ranks: int,
    disturbance: Mapping[str, float],
    output: Path,
    logged_step: Callable[[], int],
    kill_at: int | None,
    victim: int,
    quiet_s: float,
) -> Attempt:
    """Run until it ends, or kill one rank with SIGKILL once a step was logged.

    Args:
        disturbance: what every rank does to itself, as ``rank.py`` reads it.
        output: a file that gets what is printed.
        logged_step: the last step that this attempt logged; ``first_step`` before.
        kill_at: the step after which ``victim`` is killed; None never.
        quiet_s: without a new step for so long, the attempt hangs and is ended.
    """
    members: list[int] = []
    began_s = moved_s = time.monotonic()
    killed, hung, step = False, False, attempt.first_step
    with ThreadPoolExecutor(1) as thread:
        ended: Future[int | None] = thread.submit(
            run_ranks,
            ranks,
            (os.fspath(RANK), json.dumps(dict(disturbance)), *flags),
            environment=cpu_environment(),
            output=output,
            timeout_s=_LONGEST_S,
            begun=members.extend,
        )
        try:
            while not ended.done():
                time.sleep(POLL_S)
                if (now := logged_step()) != step:
                    step, moved_s = now, time.monotonic()
                    attempt.usage += _usage(members, step)
                if kill_at is not None and step >= kill_at and members and not killed:
                    killed = True
                    _kill(members[victim])
                if time.monotonic() - moved_s > quiet_s and not hung:
                    hung = True
                    _kill(*members)
        except BaseException:  # the thread would wait for them
            _kill(*members)
            raise
    attempt.last_step = logged_step()
    attempt.seconds = time.monotonic() - began_s
    attempt.orphans = end_orphans(members)
    finished = ended.result() == 0
    attempt.ended = "hung" if hung else "finished" if finished else "killed" if killed else "failed"
    return attempt


def end_orphans(members: Sequence[int]) -> int:
    """Processes that ranks have left behind; they are ended. Children of one count with it: those
    of a checkpoint writer are PyTorch's compile workers, in releases that start them on import."""
    deadline_s = time.monotonic() + _WRITERS_END_IN_S
    while (left := _in_sessions(members)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    _kill(*left)
    return sum(parent not in left for parent in left.values())


def _in_sessions(leaders: Sequence[int]) -> dict[int, int]:
    """Processes of these sessions that run, and their parents; a child stays in its rank's when
    that has ended."""
    found = {}
    for process in psutil.process_iter(["status", "ppid"]):
        with suppress(OSError):
            if os.getsid(process.pid) in leaders and process.info["status"] != "zombie":
                found[process.pid] = process.info["ppid"]
    return found


def _kill(*processes: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _usage(members: Sequence[int], step: int) -> list[Usage]:
    try:
        held = [psutil.Process(member) for member in members]
        return [
            Usage(
                step=step,
                resident_megabytes=max(p.memory_info().rss for p in held) / 1e6,
                threads=max(p.num_threads() for p in held),
                open_files=max(p.num_fds() for p in held),
            )
        ]
    except (psutil.Error, ValueError):  # one of them ends at this moment
        return []
