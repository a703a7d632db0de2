# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-config recompute-attention=keep`` trains to the same digits as ``again``."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import PROGRAMS, TrainingRun
from harness import train as train_small_model

pytestmark = pytest.mark.distributed

STEPS, LAYERS, MICRO_BATCHES = 4, 4, 8
PLUGIN = ("-m", "sparsebalance_megatron.pretrain_gpt")
CASES = {
    # Several micro-batches of each chunk are in flight; evaluation runs in between.
    "interleaved": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform "
        "--split 80,20,0 --eval-iters 1 --eval-interval 2",
        PLUGIN,
    ),
    # Every other row lies on both ranks.
    "shared rows": (
        "--sparse-balance-max-context-parallel 2 --sparse-balance-device cpu "
        "--recompute-granularity selective",
        (str(PROGRAMS / "shared_micro_batches.py"),),
    ),
}
"""Flags and program."""


@pytest.mark.parametrize(
    "name", ["interleaved", pytest.param("shared rows", marks=pytest.mark.nightly)]
)
def test_kept_attention_trains_to_the_same_digits(
    name: str, documents: Path, tmp_path: Path
) -> None:
    flags, program = CASES[name]
    # Plans follow costs, which the flag changes.
    plan = ("--sparse-balance-batching", "arrival", "--sparse-balance-tuning", "off")

    def train(how: str) -> TrainingRun:
        words = (*plan, *flags.split(), "--sparse-balance-config", f"recompute-attention={how}")
        run = train_small_model(2, documents, *words, log_dir=tmp_path / how, program=program)
        return run.require_success()

    kept, again = train("keep"), train("again")
    assert kept.logged("lm_loss") == again.logged("lm_loss")
    assert len(set(kept.losses)) == STEPS
    assert kept.grad_norms == again.grad_norms
    names = ("kept_attention", "attended_again", "recomputed_otherwise")
    found, others = (
        [tuple(step["figures"][name] for name in names) for step in run.steps]
        for run in (kept, again)
    )
    assert all(kept >= LAYERS * MICRO_BATCHES and rest == [0, 0] for kept, *rest in found)
    assert set(others) == {(0, 0, 0)}
