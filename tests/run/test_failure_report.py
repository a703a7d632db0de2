# SPDX-License-Identifier: Apache-2.0
"""What is said of the ranks of a run that ended by an error; see also test_failure_drills."""

from __future__ import annotations

import signal
import threading
from argparse import Namespace

import pytest
import torch
from torch.distributed import DistBackendError, HashStore

from sparsebalance_megatron.run.failure_report import Failure, describe, failure_of, failure_report


def failure(rank: int, error: str, *, waited: bool = False, iteration: int = 7) -> Failure:
    return Failure(rank=rank, host=f"node{rank}", iteration=iteration, error=error, waited=waited)


def test_the_cause_is_told_and_not_its_echo() -> None:
    failures = [
        failure(0, "RuntimeError: Connection closed", waited=True),
        failure(3, "DataError: no file"),
    ]
    assert describe(failures, 4) == "rank 3 on node3 ended in iteration 7 by DataError: no file"


def test_ranks_that_ended_alike_are_named_together() -> None:
    failures = [failure(rank, "PlanMismatchError: other", iteration=0) for rank in (2, 0, 1)]
    assert describe(failures, 3) == (
        "rank 2 on node2 ended before the first iteration by PlanMismatchError: other "
        "(so did ranks 0, 1)"
    )


def test_silent_ranks_are_named() -> None:
    failures = [failure(0, "RuntimeError: Timed out", waited=True)]
    found = describe(failures, 12)
    assert found.startswith("nothing was heard from ranks 1, 2, 3, 4, 5, 6, 7, 8, ..., which hang")
    assert found.endswith(
        "rank 0 on node0 ended in iteration 7 by RuntimeError: Timed out, waiting for others"
    )


def test_where_all_waited_the_network_is_suspected() -> None:
    failures = [failure(rank, "RuntimeError: Timed out", waited=True) for rank in range(2)]
    assert "look at the network" in describe(failures, 2)


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
    assert failure_of(error, Namespace(rank=0)).waited is waited


def test_an_error_inside_a_collective_waited() -> None:
    try:
        torch.distributed.all_reduce("no tensor")  # type: ignore[arg-type]
    except Exception as error:
        caught = error
    assert failure_of(RuntimeError().with_traceback(caught.__traceback__), Namespace(rank=0)).waited


def end_together(capfd: pytest.CaptureFixture[str], errors: dict[int, Exception]) -> list[str]:
    """What ranks print that end by these errors, as threads with one store."""
    store = HashStore()

    def rank(number: int, error: Exception) -> None:
        args = Namespace(rank=number, world_size=len(errors), save=None, curr_iteration=4)
        with pytest.raises(type(error)), failure_report(args, lambda: store, quiet_s=0.5):
            raise error

    threads = [threading.Thread(target=rank, args=pair) for pair in errors.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return capfd.readouterr().err.splitlines()


def test_one_rank_reports_for_all(capfd: pytest.CaptureFixture[str]) -> None:
    echo = RuntimeError("gloo: Connection closed by peer")
    lines = end_together(capfd, {0: echo, 1: KeyError("weights"), 2: echo})
    assert len(lines) == 1
    assert "rank 1 on" in lines[0] and "in iteration 5 by KeyError: 'weights'" in lines[0]


def test_a_rank_that_reaches_nobody_reports_itself(capfd: pytest.CaptureFixture[str]) -> None:
    def gone() -> HashStore:
        raise RuntimeError("connection refused")

    args = Namespace(rank=1, world_size=2, save=None)
    with pytest.raises(KeyError), failure_report(args, gone):
        raise KeyError("weights")
    asked, told = capfd.readouterr().err.splitlines()
    assert asked == "sparse balance: other ranks cannot be asked: connection refused"
    assert "rank 1 on" in told


def test_a_rank_that_was_terminated_is_named_and_its_echo_is_not() -> None:
    failures = [failure(1, "Terminated", waited=True), failure(0, "RuntimeError: ", waited=True)]
    assert describe(failures, 2) == "rank 1 on node1 ended in iteration 7 by Terminated"
    assert describe(failures[:1], 3).startswith(
        "SIGTERM came to rank 1 in iteration 7; nothing was heard from ranks 0, 2"
    )


def test_sigterm_is_reported_and_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    args = Namespace(rank=0, world_size=1, save=None)
    with pytest.raises(SystemExit) as raised, failure_report(args):
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    assert "rank 0 on" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_interruptions_are_not_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), failure_report(Namespace(rank=0, world_size=1, save=None)):
        raise SystemExit(2)
    assert capfd.readouterr().err == ""
