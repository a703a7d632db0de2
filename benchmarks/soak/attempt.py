# SPDX-License-Identifier: Apache-2.0
"""One attempt at a run under torchrun, watched from outside until it ends or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "SPARSE_BALANCE_SOAK"
"""In the environment of every process of a soak, by which orphans are found."""
POLL_S = 0.25
_GRACE_S = 60.0
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
    """What an attempt did. ``ended`` is "finished", "killed", "failed" or "hung"."""

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
    log: Path,
    logged_step: Callable[[], int],
    kill_at: int | None,
    victim: int,
    quiet_s: float,
) -> Attempt:
    """Run until it ends, or kill one rank with SIGKILL once a step was logged.

    Args:
        disturbance: what every rank does to itself, as ``rank.py`` reads it.
        log: gets what is printed.
        logged_step: the last step of the log.
        kill_at: the step after which ``victim`` is killed; None never.
        quiet_s: without a new step for so long, the attempt hangs and is ended.
    """
    name = f"{os.getpid()}-{attempt.first_step}-{time.monotonic_ns()}"
    environment = os.environ | {MARK: name, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)),
        *(os.fspath(RANK), json.dumps(dict(disturbance)), *flags),
    ]
    began = moved = time.monotonic()
    with log.open("a", encoding="utf-8") as printed:
        process = subprocess.Popen(
            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, text=True
        )
    killed, step = False, attempt.first_step
    while process.poll() is None:
        time.sleep(POLL_S)
        if (now := logged_step()) != step:
            step, moved = now, time.monotonic()
            attempt.usage += _usage(_ranks_of(process), step)
        if kill_at is not None and step >= kill_at and not killed:
            members = _ranks_of(process)
            if victim in members:
                members[victim].kill()
                killed = True
        if time.monotonic() - moved > quiet_s:
            attempt.ended = "hung"
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    attempt.last_step = logged_step()
    attempt.seconds = time.monotonic() - began
    attempt.orphans = end_orphans(name)
    if not attempt.ended:
        attempt.ended = "finished" if process.returncode == 0 else "killed" if killed else "failed"
    return attempt


def end_orphans(name: str) -> int:
    """Processes of an attempt that are left after it, which are ended; Megatron's checkpoint
    writers end by themselves in a moment, and are given it."""
    deadline = time.monotonic() + 10
    while (left := _marked(name)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in left:
        process.kill()
    return len(left)


def _marked(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _ranks_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Rank -> its process, a child of torchrun's."""
    members: dict[int, psutil.Process] = {}
    try:
        for process in psutil.Process(launcher.pid).children():
            rank = process.environ().get("RANK")
            if rank is not None:
                members[int(rank)] = process
    except psutil.Error:  # it ends at this moment
        return {}
    return members


def _usage(members: Mapping[int, psutil.Process], step: int) -> list[Usage]:
    try:
        return [
            Usage(
                step=step,
                resident_megabytes=max(p.memory_info().rss for p in members.values()) / 1e6,
                threads=max(p.num_threads() for p in members.values()),
                open_files=max(p.num_fds() for p in members.values()),
            )
        ]
    except (psutil.Error, ValueError):  # one of them ends at this moment
        return []
