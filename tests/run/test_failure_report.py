# SPDX-License-Identifier: Apache-2.0
"""What is said of the ranks of a run that ended by an error; see also test_failure_drills."""

import re
import signal
import threading
from functools import partial
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError, HashStore
from torch.distributed.checkpoint import CheckpointException

from sparsebalance_megatron.run.failure_report import (
    Failure,
    describe,
    failure_of,
    failure_report,
    resume_advice,
)

NO_INTERFACE = "[gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7"
ECHO = ("RuntimeError: Timed out", True)
DESCRIBED = {
    "the cause, not its echo": (
        {0: ECHO, 3: ("DataError: no file", False)},
        *(4, "rank 3 on node3 ended in iteration 7 by DataError: no file"),
    ),
    "alike": ({rank: ("OSError: x", False) for rank in (2, 0, 1)}, 3, "so did ranks 0, 1"),
    "silent": ({0: ECHO}, 12, "from ranks 1, 2, 3, 4, 5, 6, 7, 8, ... "),
    "all waited": ({0: ECHO, 1: ECHO}, 2, "network"),
    "terminated, others silent": ({1: ("Terminated", True)}, 3, "heard from ranks 0, 2"),
}
"""Rank -> its error, and whether it waited; all ranks; what is said."""


@pytest.mark.parametrize("case", DESCRIBED)
def test_the_ranks_to_blame_are_named(case: str) -> None:
    errors, ranks, part = DESCRIBED[case]
    failures = [
        Failure(rank=rank, host=f"node{rank}", iteration=7, error=error, waited=waited)
        for rank, (error, waited) in errors.items()
    ]
    told = describe(failures, ranks)
    assert part in told
    assert ("Timed out" in told) == (case in ("silent", "all waited")), "echoes are not told"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(NO_INTERFACE), "GLOO_SOCKET_IFNAME"),
        (DistBackendError("Bootstrap : no socket interface found"), "NCCL_SOCKET_IFNAME"),
        (RuntimeError("epoll_create: Too many open files"), "ulimit -n"),
        (OSError(28, "No space left on device", "events.out"), "disk"),
        (AssertionError(), "AssertionError (test_failure_report.py:"),
        (
            CheckpointException("ranks:dict_keys([1])", {1: (KeyError("weights"), StackSummary())}),
            "KeyError: 'weights'",
        ),
    ],
)
def test_an_error_names_the_place_or_the_remedy(error: BaseException, told: str) -> None:
    try:
        raise error
    except BaseException as caught:
        found = failure_of(caught, 0, 0)
    assert told in found.error
    assert not found.waited


def test_a_checkpoint_that_failed_on_another_rank_is_an_echo() -> None:
    assert failure_of(CheckpointException("ranks:dict_keys([])", {}), 1, 6).waited


@pytest.mark.parametrize(("free", "is_full"), [(0, True), (10**9, False), (10**6, False)])
def test_a_full_disk_is_named(
    free: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=free, total=50 * 10**6 if free < 10**9 else 10**12)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    assert ("that disk is full" in resume_advice(tmp_path)) == is_full


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (DistBackendError("NCCL error"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("timed out waiting for nothing"), False),
    ],
)
def test_errors_that_only_say_that_another_rank_did_not_answer(
    error: Exception, waited: bool
) -> None:
    assert failure_of(error, 0, 0).waited is waited


def test_an_error_inside_a_collective_waited() -> None:
    try:
        torch.distributed.all_reduce("no tensor")  # type: ignore[arg-type]
    except Exception as error:
        caught = error
    assert failure_of(RuntimeError().with_traceback(caught.__traceback__), 0, 0).waited


report = partial(failure_report, rank=0, world_size=1, save=None, iteration=lambda: 5)


def end_together(capfd: pytest.CaptureFixture[str], errors: dict[int, Exception]) -> list[str]:
    """What ranks print that end by these errors, as threads with one store."""
    store = HashStore()

    def rank(number: int, error: Exception) -> None:
        ranks = {"rank": number, "world_size": len(errors)}
        with pytest.raises(type(error)), report(**ranks, open_store=lambda: store, quiet_s=3.0):
            raise error

    threads = [threading.Thread(target=rank, args=pair) for pair in errors.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    # Megatron may be imported here for the first time, which prints lines of its own.
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("sparse balance")]


def test_a_report_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = end_together(capfd, {0: KeyError("long" * 5000 + "\n")})
    assert "by KeyError: 'longlong" in line and len(line) < 1100


def test_one_rank_reports_for_all(capfd: pytest.CaptureFixture[str]) -> None:
    echo = RuntimeError("gloo: Connection closed by peer")
    lines = end_together(capfd, {0: echo, 1: KeyError("weights"), 2: echo})
    assert len(lines) == 1
    assert "rank 1 on" in lines[0] and "in iteration 5 by KeyError: 'weights'" in lines[0]


def test_a_rank_that_reaches_nobody_reports_itself(capfd: pytest.CaptureFixture[str]) -> None:
    def gone() -> HashStore:
        raise RuntimeError("connection refused")

    with pytest.raises(KeyError), report(rank=1, world_size=2, open_store=gone):
        raise KeyError("weights")
    asked, told = capfd.readouterr().err.splitlines()
    assert asked == "sparse balance: other ranks cannot be asked: connection refused"
    assert "rank 1 on" in told


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (1, "rank 0 on .* ended in iteration 5 by Terminated$"),
        (2, "SIGTERM came to rank 0 in iteration 5; nothing was heard from rank 1"),
    ],
)
def test_sigterm_is_reported_and_ends_the_process(
    ranks: int, told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the others are quiet."""
    monkeypatch.setattr("sparsebalance_megatron.run.failure_report.LONGEST_WAIT_S", 1e4)
    alone = report(world_size=ranks, open_store=HashStore, quiet_s=0.1)
    with pytest.raises(SystemExit) as raised, alone:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    assert re.search(told, capfd.readouterr().err, re.MULTILINE)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
