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
from torch.distributed import DistBackendError, HashStore
from torch.distributed.checkpoint import CheckpointException

from sparsebalance_megatron.run.failure_report import described, failure_report, resume_advice

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
NO_INTERFACE = "[gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7"
LATE = CheckpointException("ranks:dict_keys([])", {})
OF_RANK_1 = CheckpointException("ranks:[1]", {1: (KeyError("weights"), StackSummary())})


@pytest.mark.parametrize(
    ("error", "told", "is_echo"),
    [
        (RuntimeError(NO_INTERFACE), "GLOO_SOCKET_IFNAME", False),
        (DistBackendError("Bootstrap : no socket interface found"), "NCCL_SOCKET_IFNAME", False),
        (OSError(28, "No space left on device", "events.out"), "disk", False),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out", False),
        (ValueError("timed out waiting for nothing"), "ValueError", False),
        (OF_RANK_1, "KeyError: 'weights'", False),
        (LATE, "ranks", True),
        (RuntimeError(CLOSED), "Connection closed", True),
        (DistBackendError("error"), "DistBackendError", True),
    ],
)
def test_an_error_is_a_cause_or_an_echo(error: BaseException, told: str, is_echo: bool) -> None:
    text, found = described(error)
    assert told in text and found is is_echo


@pytest.mark.parametrize(("free", "is_full"), [(0, True), (10**9, False), (10**6, False)])
def test_a_full_disk_is_named(
    free: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=free, total=50 * 10**6 if free < 10**9 else 10**12)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    assert ("that disk is full" in resume_advice(tmp_path)) == is_full


report = partial(failure_report, rank=0, world_size=1, save=None, iteration=lambda: 5)
ECHO = RuntimeError(CLOSED)


@pytest.mark.parametrize(
    ("errors", "ranks", "told"),
    [
        ({0: KeyError("long" * 5000 + "\n")}, 1, "by KeyError: 'longlong"),
        ({0: ECHO, 1: KeyError("w"), 2: ECHO}, 3, "rank 1 on .* in iteration 5 by KeyError: 'w'"),
        ({0: OSError("x"), 1: OSError("x")}, 2, "by OSError: x"),
        ({0: ECHO, 2: ECHO}, 4, "nothing was heard from ranks 1, 3 .*; rank"),
        ({0: ECHO, 1: ECHO}, 2, "network"),
    ],
)
def test_one_rank_reports_for_all_in_a_line(
    errors: dict[int, Exception], ranks: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks are threads with one store."""
    store = HashStore()

    def rank(number: int, error: Exception) -> None:
        of_rank = report(rank=number, world_size=ranks, store=lambda: store, wait_s=3.0)
        with pytest.raises(type(error)), of_rank:
            raise error

    threads = [threading.Thread(target=rank, args=pair) for pair in errors.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    # Megatron may be imported here for the first time, which prints lines of its own.
    lines = capfd.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith("sparse balance"))
    assert re.search(told, line) and len(line) < 1100


def test_a_rank_that_reaches_nobody_reports_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), report(rank=1, world_size=2):
        raise KeyError("weights")
    assert "rank 1 on" in capfd.readouterr().err


def test_sigterm_is_reported_and_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised, report():
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    assert capfd.readouterr().err.endswith("ended in iteration 5 by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
