# SPDX-License-Identifier: Apache-2.0
"""Windows in Megatron's loop: after warm-up, across checkpoints, logged; evaluation sees none."""

from pathlib import Path

import numpy as np
import pytest
from data.stored_documents import open_stored
from harness import TrainingRun, assert_same_steps, read_steps, train

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig

SIZE, STEPS, WARM_UP = 8, 11, 2
FLAGS = (
    *("--train-iters", str(STEPS), "--lr-warmup-iters", str(WARM_UP), "--lr-decay-style", "linear"),
    *("--ckpt-format", "torch_dist", "--override-opt-param-scheduler"),
    *("--split", "80,20,0", "--eval-interval", str(STEPS), "--eval-iters", "1"),
)


def samples_of_steps(log_dir: Path) -> list[list[int]]:
    by_rank = [read_steps(log_dir, rank) for rank in (0, 1)]
    return [
        sorted(n for step in steps for each in step["micro_batches"] for n in each["samples"])
        for steps in zip(*by_rank, strict=True)
    ]


def together(steps: list[list[int]]) -> list[int]:
    return sorted(sample for step in steps for sample in step)


@pytest.mark.distributed
def test_a_run_with_windows_resumes_in_the_middle_of_one(documents: Path, tmp_path: Path) -> None:
    def run(name: str, window: int, *more: str) -> TrainingRun:
        flags = (*FLAGS, "--sparse-balance-window", str(window), *more)
        return train(2, documents, *flags, log_dir=tmp_path / name).require_success()

    def resumed(name: str, window: int) -> TrainingRun:
        load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", "4")
        return run(name, window, *load)

    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "4")
    whole, plain = run("whole", 4, *save), run("plain", 1)
    assert "from iteration 3 on samples change places within 4 steps" in whole.output
    index = open_stored(documents, max_tokens=256, seed=1234, split_weights="80,20,0")
    arrived = [sorted(index.global_batch(SIZE * step, SIZE).tolist()) for step in range(STEPS)]
    assert samples_of_steps(tmp_path / "plain") == arrived
    found = samples_of_steps(tmp_path / "whole")
    assert found[:WARM_UP] == arrived[:WARM_UP]
    assert found != arrived
    for first, end in ((2, 6), (6, 10), (10, 11)):
        assert together(found[first:end]) == together(arrived[first:end])
    logged = whole.logged("window")
    assert [each["number"] for each in logged] == [0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [each["steps"] for each in logged] == [1] * 2 + [4] * 8 + [1]
    for number, each in enumerate(logged):
        assert each["sample_tokens"] == index.lengths_of(np.array(found[number])).sum()
    assert any(each["steps_moved"] > 0 for each in logged)
    assert "window" not in plain.steps[0]
    assert plain.losses[:WARM_UP] == whole.losses[:WARM_UP]

    again = resumed("again", 4)
    assert again.logged("iteration") == list(range(5, STEPS + 1))
    assert_same_steps(again.steps, whole.steps)
    # The window ends as it began; steps 6 to 8, 8 to 10 and the last follow.
    changed = samples_of_steps(tmp_path / "changed") if resumed("changed", 2) else []
    assert changed[:2] == found[4:6]
    for first, end in ((6, 8), (8, 10), (10, 11)):
        own = changed[first - 4 : end - 4]
        assert together(own) == together(arrived[first:end])


def test_order_of_arrival_and_windows_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--sparse-balance-batching arrival keeps"):
        SparseBalanceConfig(window=2, batching="arrival")
