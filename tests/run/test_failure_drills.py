# SPDX-License-Identifier: Apache-2.0
"""Failures while training: each ends with a message, and the run can go on from its checkpoint.

One run goes through several of them: a rank is killed in the middle of a step, the next attempt
cannot write its checkpoint, the third finishes, with the losses and plans of never stopping.
"""

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, TrainingRun, assert_same_steps, train

from sparsebalance_megatron.log.reader import read_rank_logs, read_run_log
from sparsebalance_megatron.view.report.pictures import measured_timeline

pytestmark = pytest.mark.distributed

STEPS, SAVE_INTERVAL = 6, 3
KILLED_IN_STEP = 4
"""Counted from 0: the fifth, one after the checkpoint."""
ENDS_WITHIN_S = 120
CHECKPOINT_BYTES = 1 << 19
"""Less than a file of the model's checkpoint; more than what a run prints or logs."""
FAULTS = str(PROGRAMS / "failing_rank.py")
MARK = "SPARSE_BALANCE_DRILL"
"""A variable of the environment, to find what a run leaves behind."""
LEFT_WITHIN_S = 10

FAULT_STEP = 2
"""Step at which a run without checkpoints fails, after two whole ones."""


@pytest.fixture(scope="module")
def directory(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drills")
    for suffix in (".bin", ".idx"):
        shutil.copy(documents.with_suffix(suffix), directory / f"train{suffix}")
    return directory


@pytest.fixture(scope="module")
def whole(directory: Path) -> TrainingRun:
    """Never stops."""
    return _train(2, directory, log_dir=directory / "whole").require_success()


@pytest.fixture(scope="module")
def checkpoints(directory: Path, whole: TrainingRun) -> Path:
    """Those of a run that is killed, cannot save, and then ends as one that never stopped."""
    checkpoints = directory / "checkpoints"
    killed = _attempt(directory, "kill", str(KILLED_IN_STEP))
    assert killed.exit_code != 0
    assert "SIGKILL" in killed.output
    assert "nothing was heard from rank 1" in killed.output
    assert len(killed.losses) == KILLED_IN_STEP
    saved_step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert saved_step == SAVE_INTERVAL

    # Megatron's writer says that it failed, not why; the last line says what is left.
    full = _attempt(directory, "file-size", str(CHECKPOINT_BYTES))
    assert full.exit_code == 1
    assert f"saving checkpoint at iteration       {STEPS}" in full.output
    assert "by RuntimeError: Worker failure" in full.output
    assert f"checkpoint in {checkpoints} is of iteration {SAVE_INTERVAL}; mend" in full.output
    assert f"resume with --load {checkpoints}" in full.output

    # Losses come from the step log: after a start Megatron prints a mean of two.
    finished = _train(2, directory, *_checkpoints(directory), log_dir=directory / "attempts")
    assert finished.require_success().grad_norms == whole.grad_norms[SAVE_INTERVAL:]
    assert finished.logged("iteration") == [1, 2, 3, 4, 4, 5, 6, 4, 5, 6]
    assert_same_steps(finished.steps, whole.steps)
    return checkpoints


def test_wall_clocks_that_jump_change_nothing(directory: Path, whole: TrainingRun) -> None:
    """Two hours back and forth, on one rank: what is measured and waited for is not by them."""
    run = _train(
        *(2, directory, "--sparse-balance-device", "cpu"),
        log_dir=directory / "clock",
        timeout_s=ENDS_WITHIN_S,
        program=(FAULTS, "clock", "1"),
    ).require_success()
    assert (run.losses, run.grad_norms) == (whole.losses, whole.grad_norms)
    assert run.logged("iteration") == [1, 2, 3, 4, 5, 6]
    assert all(0.0 < step["iteration_ms"] < 1e3 * ENDS_WITHIN_S for step in run.steps[1:])
    last = read_rank_logs(directory / "clock", STEPS).steps
    starts_s = [step.start_unix_s for step in last.values()]
    assert abs(starts_s[0] - starts_s[1]) > 3600.0
    timeline = measured_timeline(read_run_log(directory / "clock").steps[-1], last)
    assert timeline is not None and timeline.makespan_ms < 1e3 * ENDS_WITHIN_S


def test_a_run_that_failed_twice_goes_on_but_not_with_changed_data(
    directory: Path, checkpoints: Path, tmp_path: Path
) -> None:
    """A single token of a document: one line, on one rank, before training."""
    for suffix in (".bin", ".idx"):
        shutil.copy(directory / f"train{suffix}", tmp_path / f"train{suffix}")
    with (tmp_path / "train.bin").open("r+b") as tokens:
        tokens.write(b"\xfe")
    load = ("--load", str(checkpoints), "--override-opt-param-scheduler")
    data = ("--data-path", str(tmp_path / "train"))
    run = _train(1, directory, *load, *data, "--train-iters", "8", timeout_s=ENDS_WITHIN_S)
    assert run.exit_code == 2, run.output[-4000:]
    assert "Traceback" not in run.output
    assert "--data-path: the training samples are not those of the checkpoint" in run.output
    assert "--finetune" in run.output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reader", "ended in iteration 3 by DataError: train.bin: cannot be read"),
        ("digest", "PlanMismatchError: step 2: ranks [1] executed another plan than rank 0"),
        pytest.param(
            "stop",
            "nothing was heard from rank 1 (hanging, killed, or out of reach)",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_fault_in_the_middle_of_a_step(directory: Path, fault: str, message: str) -> None:
    run = with_fault(directory, fault)
    assert run.exit_code != 0
    (told,) = (line for line in run.output.splitlines() if " ended in iteration" in line)
    assert message in told, run.output[-4000:]
    assert len(run.losses) == FAULT_STEP
    assert run.logged("iteration") == [1, 2]


@pytest.mark.nightly
@pytest.mark.parametrize(("end", "told"), [("kill", "heard from rank 1"), ("term", "by SIGTERM")])
def test_a_rank_that_ends_inside_an_exchange_is_named_and_leaves_no_process(
    directory: Path, end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are written by processes of their own, which must end with their ranks."""
    monkeypatch.setenv(MARK, str(tmp_path))
    run = _train(
        *(2, directory, "--sparse-balance-device", "cpu", "--save", str(tmp_path)),
        *("--save-interval", "2", "--sparse-balance-max-context-parallel", "2"),
        *("--sparse-balance-max-tokens-per-micro-batch", "160"),
        *("--sparse-balance-config", "positions=fixed"),
        timeout_s=ENDS_WITHIN_S,
        program=(FAULTS, f"exchange-{end}", str(KILLED_IN_STEP)),
        torchrun=True,
    )
    assert run.exit_code != 0
    assert told in run.output and "resume with --load" in run.output
    limit_s = time.monotonic() + LEFT_WITHIN_S
    while (left := _marked(str(tmp_path))) and time.monotonic() < limit_s:
        time.sleep(0.5)
    assert left == {}


def _marked(value: str) -> dict[str, bytes]:
    """Process id -> command line of the processes whose environment has the mark."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={value}\0".encode() in (process / "environ").read_bytes():
                found[process.name] = (process / "cmdline").read_bytes()
    return found


def test_a_loss_that_is_no_number_is_run_again_as_megatron_does(
    directory: Path, tmp_path: Path
) -> None:
    """It is NaN again, so Megatron saves, and ends with the code that asks for another start."""
    save = ("--save", str(tmp_path), "--save-interval", "100")
    run = with_fault(directory, "nan", *save)
    assert "Need to rerun step to check reproducibility" in run.output
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(FAULT_STEP)
    assert len(run.losses) == FAULT_STEP
    _check_that_nan_is_named(run, FAULT_STEP + 1)


def test_nan_that_ends_training_without_a_checkpoint_is_named(documents: Path) -> None:
    """Weights of 1e30 after one step; Megatron fails on its own where it cannot save then."""
    _check_that_nan_is_named(train(2, documents, "--lr", "1e30", "--clip-grad", "0"), 2)


def _check_that_nan_is_named(run: TrainingRun, iteration: int) -> None:
    assert run.exit_code == 16, run.output[-4000:]
    (line,) = re.findall(r"sparse balance: Megatron ended training in .*", run.output)
    assert f"iteration {iteration} because a loss or gradient was NaN or infinite" in line
    assert "Traceback" not in run.output


def with_fault(directory: Path, fault: str, *flags: str) -> TrainingRun:
    """Two ranks, which must end by themselves."""
    return _train(
        *(2, directory, *flags),
        log_dir=directory / fault,
        timeout_s=ENDS_WITHIN_S,
        program=(FAULTS, fault, str(FAULT_STEP), "--sparse-balance-device", "cpu"),
    )


def _train(ranks: int, directory: Path, *flags: str, **options: Any) -> TrainingRun:
    common = ("--ckpt-format", "torch_dist", "--train-iters", str(STEPS))
    return train(ranks, directory / "train", *common, *flags, **options)


def _checkpoints(directory: Path) -> tuple[str, ...]:
    where = str(directory / "checkpoints")
    return ("--save", where, "--load", where, "--save-interval", str(SAVE_INTERVAL))


def _attempt(directory: Path, *fault: str) -> TrainingRun:
    """Two ranks with a fault. They must end by themselves.

    Through torchrun seeds of string hashes differ between ranks; plans may not.
    """
    return _train(
        *(2, directory, *_checkpoints(directory), "--sparse-balance-device", "cpu"),
        log_dir=directory / "attempts",
        timeout_s=ENDS_WITHIN_S,
        program=(FAULTS, *fault),
        torchrun=fault[0] == "kill",
    )
