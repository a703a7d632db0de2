# SPDX-License-Identifier: Apache-2.0
"""Training whose global batch grows: iterations and samples are Megatron's in every log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    TrainingRun,
    assert_same_steps,
    long_tailed_lengths,
    read_steps,
    run_training,
    write_documents,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.distributed

SIZES = [4, 4, 8, 8, 12]
"""From the schedule in tokens below: at 8 and at 24 samples of 256 tokens."""
SCHEDULE = "0:4 2048:8 6144:12"
SAVED = 2
_LINE = re.compile(r"iteration +(\d+)/.*?consumed samples: +(\d+) .*?global batch size: +(\d+)")


def test_growing_batches_are_megatrons_in_every_log_and_resume(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "train", long_tailed_lengths(40, longest=250))
    at = TRAINING_FLAGS.index("--global-batch-size")

    def train(name: str, *more: str) -> TrainingRun:
        flags = (
            *(*MODEL_FLAGS, *TRAINING_FLAGS[:at], *TRAINING_FLAGS[at + 2 :], *BALANCE_FLAGS),
            *("--data-path", str(prefix), "--step-batch-size-schedule", SCHEDULE),
            *("--train-iters", str(len(SIZES)), "--ckpt-format", "torch_dist"),
            *("--override-opt-param-scheduler", *more),
            *("--tensorboard-dir", str(tmp_path / f"{name}-board")),
        )
        return run_training(2, flags, log_dir=tmp_path / name).require_success()

    checkpoints, log_dir = str(tmp_path / "checkpoints"), tmp_path / "whole"
    whole = train("whole", "--save", checkpoints, "--save-interval", str(SAVED))
    resumed = train("resumed", "--load", checkpoints, "--ckpt-step", str(SAVED))

    printed = [tuple(map(int, numbers)) for numbers in _LINE.findall(whole.output)]
    consumed = [sum(SIZES[: step + 1]) for step in range(len(SIZES))]
    assert printed == list(zip(range(1, 6), consumed, SIZES, strict=True))
    assert [step["iteration"] for step in whole.steps] == [1, 2, 3, 4, 5]
    for step, size in zip(whole.steps, SIZES, strict=True):
        # [data-parallel rank][stage][virtual stage][micro-batch]
        assert all(
            len(chunk) == size // 2
            for rank in step["measured"]["times_2RPVM"][0]
            for stage in rank
            for chunk in stage
        )
    for number, steps in enumerate(zip(*(read_steps(log_dir, r) for r in (0, 1)), strict=True)):
        assert [step["iteration"] for step in steps] == [number + 1] * 2
        held = [each for step in steps for each in step["micro_batches"]]
        assert len({sample for each in held for sample in each["samples"]}) == SIZES[number]
    events = EventAccumulator(str(tmp_path / "whole-board")).Reload()
    assert [each.step for each in events.Scalars("sparse-balance/coverage-min")] == [1, 2, 3, 4, 5]

    assert [step["iteration"] for step in resumed.steps] == [3, 4, 5]
    assert resumed.grad_norms == whole.grad_norms[SAVED:]
    assert_same_steps(resumed.steps, whole.steps)
