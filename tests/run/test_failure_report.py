# SPDX-License-Identifier: Apache-2.0
"""What is said of the ranks of a run that ended by an error; see also test_failure_drills."""

import re
import signal
import threading
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError, HashStore
from torch.distributed.checkpoint import CheckpointException

from sparsebalance_megatron.run.failure_report import described, failure_report, resume_advice

ECHO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
NO_INTERFACE = "[gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth7"
OF_RANK_1 = CheckpointException("ranks:[1]", {1: (KeyError("weights"), StackSummary())})


@pytest.mark.parametrize(
    ("error", "told", "is_echo"),
    [
        (RuntimeError(NO_INTERFACE), "GLOO_SOCKET_IFNAME", False),
        (OSError(28, "No space left on device", "events.out"), "disk", False),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out", False),
        (ValueError("timed out waiting for nothing"), "ValueError", False),
        (OF_RANK_1, "KeyError: 'weights'", False),
        (CheckpointException("ranks:dict_keys([])", {}), "ranks", True),
        (ECHO, "Connection closed", True),
        (DistBackendError("error"), "DistBackendError", True),
    ],
)
def test_an_error_is_a_cause_or_an_echo(error: BaseException, told: str, is_echo: bool) -> None:
    text, found = described(error)
    assert told in text and found is is_echo


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
        how = {"save": None, "iteration": lambda: 5, "store": lambda: store, "wait_s": 3.0}
        with pytest.raises(type(error)), failure_report(rank=number, world_size=ranks, **how):
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


def test_sigterm_ends_the_process_and_what_is_left_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reaches no other tells it."""
    how = {"world_size": 2, "save": str(tmp_path), "iteration": lambda: 5}
    with pytest.raises(SystemExit) as raised, failure_report(rank=1, **how):
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    said = capfd.readouterr().err
    assert "ended in iteration 5 by SIGTERM\n" in said and "no complete checkpoint" in said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for free, is_full in ((0, True), (10**9, False)):
        disk = SimpleNamespace(free=free, total=10**12)
        monkeypatch.setattr("shutil.disk_usage", lambda path, disk=disk: disk)
        assert ("that disk is full" in resume_advice(tmp_path)) == is_full
