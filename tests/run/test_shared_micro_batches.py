# SPDX-License-Identifier: Apache-2.0
"""Runs whose micro-batches are shared by ranks: evaluation, and resuming with other cp_sizes.

That layouts train alike is for test_matrix.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import FEW_ROUNDINGS, PROGRAMS, TrainingRun
from harness import train as train_small_model

pytestmark = pytest.mark.distributed

PRINTED_DIGITS = 1e-6
SHARED_BY_2 = ("--sparse-balance-max-context-parallel", "2")


def train(ranks: int, documents: Path, *flags: str, **options: Any) -> TrainingRun:
    plan_settings = ("--sparse-balance-tuning", "off", "--sparse-balance-batching", "latency")
    flags = ("--sparse-balance-device", "cpu", *plan_settings, *flags)
    return train_small_model(ranks, documents, *flags, **options).require_success()


def test_evaluation_and_a_checkpoint_do_not_depend_on_cp_sizes(
    documents: Path, tmp_path: Path
) -> None:
    """One rank; two that share rows by lot until iteration 2; two of a context group after it."""
    evaluate = ("--split", "80,10,10", "--eval-iters", "2", "--eval-interval", "2")
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    save = (*save, "--ckpt-format", "torch_dist")
    load = ("--load", str(tmp_path / "saved"), "--ckpt-format", "torch_dist")
    one = train(1, documents, *evaluate, log_dir=tmp_path / "one")
    shared = train(
        *(2, documents, *evaluate, *save, *SHARED_BY_2, "--exit-interval", "2"),
        program=(str(PROGRAMS / "shared_micro_batches.py"),),
        log_dir=tmp_path / "shared",
    )
    context = train(
        *(2, documents, *evaluate, *load, "--context-parallel-size", "2"),
        *("--sparse-balance-config", "context-parallel=static"),
        log_dir=tmp_path / "context",
    )
    losses = shared.logged("lm_loss") + context.logged("lm_loss")
    assert losses == pytest.approx(one.logged("lm_loss"), rel=FEW_ROUNDINGS)
    found = evaluated(shared)[:1] + evaluated(context)
    assert found == pytest.approx(evaluated(one), rel=PRINTED_DIGITS)
    assert len(found) >= 2


@pytest.mark.parametrize(
    ("micro_batch_size", "cap"),
    [
        (1, (*SHARED_BY_2, "--sparse-balance-max-tokens-per-micro-batch", "128")),
        pytest.param(
            *(2, ("--sparse-balance-max-tokens-per-micro-batch", "256")), marks=pytest.mark.nightly
        ),
    ],
)
def test_evaluation_keeps_the_cap_of_training(
    micro_batch_size: int, cap: tuple[str, ...], documents: Path
) -> None:
    """Samples of up to 250 tokens lie on both ranks, or two of them are balanced under the cap."""
    evaluate = ("--split", "60,40,0", "--eval-iters", "2", "--eval-interval", "1")
    still = ("--lr", "1e-30", "--train-iters", "1", "--micro-batch-size", str(micro_batch_size))
    one = train(1, documents, *evaluate, *still)
    planned = ("--sparse-balance-batching", "makespan")
    capped = train(2, documents, *evaluate, *still, *cap, *planned)
    assert evaluated(capped) == pytest.approx(evaluated(one), rel=PRINTED_DIGITS)


def evaluated(run: TrainingRun) -> list[float]:
    """Validation losses in the order they were printed."""
    found = re.findall(
        r"validation loss at iteration \d+ .*?lm loss value: ([-+.\dE]+)", run.output
    )
    return [float(value) for value in found]
