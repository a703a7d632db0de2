# SPDX-License-Identifier: Apache-2.0
"""Invariant 6: save, kill, resume gives the losses and plans of never stopping.

Losses come from the step log: after a start Megatron prints the mean of the first two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    long_tailed_lengths,
    run_training,
    write_documents,
)

pytestmark = pytest.mark.distributed


def test_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", long_tailed_lengths(30, longest=250))
    flags = (
        *MODEL_FLAGS,
        *TRAINING_FLAGS,
        *BALANCE_FLAGS,
        *("--data-path", str(documents), "--ckpt-format", "torch_dist"),
        *("--sparse-balance-window", "2", "--train-iters", "6"),
    )
    whole = run_training(2, flags, log_dir=tmp_path / "whole").require_success()
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "3")
    killed = run_training(2, (*flags, *save, "--exit-interval", "3"), log_dir=tmp_path / "resumed")
    assert len(killed.losses) == 3
    resumed = run_training(
        2,
        (*flags, *save, "--load", str(tmp_path / "checkpoints")),
        log_dir=tmp_path / "resumed",
    ).require_success()
    assert killed.grad_norms + resumed.grad_norms == whole.grad_norms
    for quantity in ("lm_loss", "predicted", "coverage", "tokens"):
        assert [step[quantity] for step in resumed.steps] == [
            step[quantity] for step in whole.steps
        ], quantity


def test_checkpoint_without_plugin_state_loads_with_a_message(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", long_tailed_lengths(30, longest=250))
    common = (*MODEL_FLAGS, *TRAINING_FLAGS, "--ckpt-format", "torch_dist")
    save = ("--save", str(tmp_path / "plain"), "--save-interval", "2", "--train-iters", "2")
    run_training(1, (*common, "--mock-data", *save)).require_success()
    flags = (
        *common,
        *BALANCE_FLAGS,
        *("--data-path", str(documents), "--override-opt-param-scheduler"),
    )
    resumed = run_training(1, (*flags, "--load", str(tmp_path / "plain"))).require_success()
    assert "has no plugin state" in resumed.output
    assert len(resumed.losses) == 2
