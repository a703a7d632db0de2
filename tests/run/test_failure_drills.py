# SPDX-License-Identifier: Apache-2.0
"""Failures while training: each ends with a message, and the run can go on from its checkpoint."""

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import PROGRAMS, TrainingRun, assert_same_steps, train

pytestmark = pytest.mark.distributed

STEPS, SAVE_INTERVAL, KILLED_IN_STEP, FAULT_STEP = 6, 3, 4, 2
"""Steps with a fault are counted from 0: a rank is killed one step after the checkpoint."""
ENDS_WITHIN_S = 120
CHECKPOINT_BYTES = 1 << 19
"""Less than a file of the model's checkpoint; more than what a run prints or logs."""
FAULTS = str(PROGRAMS / "failing_rank.py")
MARK = "SPARSE_BALANCE_DRILL"
"""A variable of the environment, to find what a run leaves behind."""
LEFT_WITHIN_S = 5


def drill(fault: str, value: int, documents: Path, log_dir: Path, *flags: str) -> TrainingRun:
    """Two ranks with a fault, which must end by themselves.

    Through torchrun seeds of string hashes differ between ranks; plans may not.
    """
    flags = ("--ckpt-format", "torch_dist", "--train-iters", str(STEPS), *flags)
    return train(
        *(2, documents, *flags, "--sparse-balance-device", "cpu"),
        log_dir=log_dir,
        timeout_s=ENDS_WITHIN_S,
        program=(FAULTS, fault, str(value)),
        torchrun=fault == "kill",
    )


def test_a_run_that_fails_twice_ends_as_one_that_never_stopped(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed in the middle of a step, the next attempt cannot write its checkpoint."""
    checkpoints, attempts = tmp_path / "checkpoints", tmp_path / "attempts"
    keep = ("--save", str(checkpoints), "--load", str(checkpoints))
    keep = (*keep, "--save-interval", str(SAVE_INTERVAL))
    whole = drill("file-size", 1 << 30, documents, tmp_path / "whole").require_success()

    monkeypatch.setenv(MARK, str(tmp_path))
    killed = drill("kill", KILLED_IN_STEP, documents, attempts, *keep)
    assert killed.exit_code != 0
    assert "SIGKILL" in killed.output
    assert "nothing was heard from rank 1" in killed.output
    assert len(killed.losses) == KILLED_IN_STEP
    # Checkpoints are written by processes of their own, which must end with their ranks.
    time.sleep(LEFT_WITHIN_S)
    assert marked(str(tmp_path)) == []

    # Megatron's writer says that it failed, not why; the last line says what is left.
    full = drill("file-size", CHECKPOINT_BYTES, documents, attempts, *keep)
    assert full.exit_code == 1
    assert "by RuntimeError: Worker failure" in full.output
    assert f"checkpoint in {checkpoints} is of iteration {SAVE_INTERVAL}; mend" in full.output
    assert f"resume with --load {checkpoints}" in full.output

    # Losses come from the step log: after a start Megatron prints a mean of two.
    finished = drill("file-size", 1 << 30, documents, attempts, *keep).require_success()
    assert finished.grad_norms == whole.grad_norms[SAVE_INTERVAL:]
    assert finished.logged("iteration") == [1, 2, 3, 4, 4, 5, 6, 4, 5, 6]
    assert_same_steps(finished.steps, whole.steps)


def marked(value: str) -> list[Path]:
    """Environments of processes that have the mark."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={value}\0".encode() in environment.read_bytes():
                found.append(environment)
    return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reader", "ended in iteration 3 by DataError: train.bin: cannot be read"),
        ("digest", "PlanMismatchError: step 2: ranks [1] executed another plan than rank 0"),
    ],
)
def test_a_fault_in_the_middle_of_a_step(
    fault: str, message: str, documents: Path, tmp_path: Path
) -> None:
    run = drill(fault, FAULT_STEP, documents, tmp_path)
    assert run.exit_code != 0
    (told,) = (line for line in run.output.splitlines() if " ended in iteration" in line)
    assert message in told, run.output[-4000:]
    assert run.logged("iteration") == [1, 2]


@pytest.mark.parametrize("saves", [True, False])
def test_a_loss_that_is_no_number_is_run_again_and_named(
    saves: bool, documents: Path, tmp_path: Path
) -> None:
    """It is NaN again, so Megatron saves, fails on its own where it cannot, and ends with the
    status that asks for another start."""
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "100") if saves else ()
    run = drill("nan", FAULT_STEP, documents, tmp_path / "log", *save)
    assert run.exit_code == 16, run.output[-4000:]
    (line,) = re.findall(r"sparse balance: Megatron ended training in .*", run.output)
    assert f"iteration {FAULT_STEP + 1} because a loss or gradient was NaN or infinite" in line
    assert "Traceback" not in run.output
    if saves:
        saved = (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text()
        assert saved == str(FAULT_STEP)
