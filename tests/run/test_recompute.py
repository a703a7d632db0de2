# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-recompute-attention keep`` trains to the same digits as ``again``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import PROGRAMS, TrainingRun
from harness import train as train_small_model

pytestmark = pytest.mark.distributed

FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1")
STEPS, LAYERS, MICRO_BATCHES = 4, 4, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """``kept`` counts the layers of micro-batches that a step's backwards recompute, all ranks."""

    flags: tuple[str, ...]
    kept: int
    program: tuple[str, ...] = ("-m", "sparsebalance_megatron.pretrain_gpt")


CASES = {
    # Several micro-batches of each chunk are in flight; evaluation runs in between.
    "interleaved": Case(
        flags=(
            *("--pipeline-model-parallel-size", "2"),
            *("--num-virtual-stages-per-pipeline-rank", "2"),
            *(*FULL, "--recompute-method", "uniform", "--split", "80,20,0"),
            *("--eval-iters", "1", "--eval-interval", "2"),
        ),
        kept=LAYERS * MICRO_BATCHES,
    ),
    # Every other row lies on both ranks.
    "shared rows": Case(
        flags=(
            *("--sparse-balance-max-context-parallel", "2", "--sparse-balance-device", "cpu"),
            *("--recompute-granularity", "selective"),
        ),
        kept=0,
        program=(str(PROGRAMS / "shared_micro_batches.py"),),
    ),
}


@pytest.mark.parametrize(
    "name", ["interleaved", pytest.param("shared rows", marks=pytest.mark.nightly)]
)
def test_kept_attention_trains_to_the_same_digits(
    name: str, documents: Path, tmp_path: Path
) -> None:
    case = CASES[name]

    def train(how: str) -> TrainingRun:
        # Plans follow costs, which the flag changes.
        plan = ("--sparse-balance-batching", "arrival", "--sparse-balance-tuning", "off")
        flags = (*plan, *case.flags, "--sparse-balance-recompute-attention", how)
        run = train_small_model(2, documents, *flags, log_dir=tmp_path / how, program=case.program)
        return run.require_success()

    kept, again = train("keep"), train("again")
    assert [step["lm_loss"] for step in kept.steps] == [step["lm_loss"] for step in again.steps]
    assert len(set(kept.losses)) == STEPS
    assert kept.grad_norms == again.grad_norms
    found = [step["recompute"] for step in kept.steps]
    least = case.kept or LAYERS * MICRO_BATCHES
    assert all(count["kept"] >= least for count in found)
    assert not any(count["again"] or count["otherwise"] for count in found)
    assert not any(any(step["recompute"].values()) for step in again.steps)
