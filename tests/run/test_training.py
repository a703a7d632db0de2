# SPDX-License-Identifier: Apache-2.0
"""The real training loop on gloo ranks: measurements, tuning, evaluation, density.

That layouts train alike is for test_matrix.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import TrainingRun, assert_same_steps, measured_ms, train

pytestmark = pytest.mark.distributed

LAST_PRINTED_LOSS_DIGIT = 1e-6
"""Relative: seven digits."""

PIPELINE = "--pipeline-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VERTICAL_SLASH = "--sparse-balance-selection vertical-slash"
# Two data-parallel ranks: of one alone, no rank has time left for higher budgets.
LAYOUTS = {
    "dp2-pp2": (4, PIPELINE),
    "dp2-pp2-virtual2": (4, f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    "dp2-vertical-slash": (2, f"{VERTICAL_SLASH} {RECOMPUTE}"),
    "dp2-full-recompute": (2, RECOMPUTE),
}


@pytest.mark.parametrize(
    "layout",
    ["dp2-pp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*LAYOUTS][1:])],
)
def test_tuned_training_measures_every_micro_batch_and_holds_coverage(
    layout: str, documents: Path, tmp_path: Path
) -> None:
    """After the first step (hooks go in with its first forward) every time is known."""
    ranks, extra = LAYOUTS[layout]
    run = _train(ranks, documents, "latency", "raise", *extra.split(), log_dir=tmp_path)
    for step in run.steps[1:]:
        assert (measured_ms(step) > 0).all()
        figures = step["figures"]
        assert figures["coverage"] >= figures["coverage_base"] - 1e-6
    moved = [
        step["predicted"]["samples_cut"] + step["predicted"]["samples_raised"] for step in run.steps
    ]
    assert any(moved)
    assert "no trained token" not in run.output


def test_evaluation_between_steps_leaves_training_as_it_was(
    documents: Path, tmp_path: Path
) -> None:
    """Evaluation has plans of its own, and Megatron takes the hooks out around it."""
    extra = ("--split", "80,10,10", "--eval-iters", "2", "--eval-interval", "2")
    with_evaluation = _train(2, documents, "latency", "raise", *extra, log_dir=tmp_path / "with")
    without = _train(2, documents, "latency", "raise", *extra[:2], log_dir=tmp_path / "without")
    assert "validation loss at iteration 2" in with_evaluation.output
    assert with_evaluation.logged("lm_loss") == without.logged("lm_loss")
    assert (measured_ms(with_evaluation.steps[-1])[0] > 0).all()


def test_dense_evaluation_is_that_of_budgets_that_cover_everything(
    documents: Path, tmp_path: Path
) -> None:
    """Weights as good as stand still, so that base budgets of training make no difference."""
    evaluate = ("--split", "50,25,25", "--eval-iters", "2", "--eval-interval", "1")
    still = ("--lr", "1e-30", "--train-iters", "2", "--sparse-balance-base-budget", "2")

    def evaluated(name: str, *flags: str) -> TrainingRun:
        return _train(
            *(1, documents, "arrival", "off", *evaluate, *still, *flags), log_dir=tmp_path / name
        )

    sparse = evaluated("sparse")
    dense = evaluated("dense", "--sparse-balance-eval-attention", "dense")
    covering = evaluated("covering", "--sparse-balance-base-budget", "1000")
    assert len(_evaluated(dense)) == 4
    assert _evaluated(dense) == pytest.approx(_evaluated(covering), rel=LAST_PRINTED_LOSS_DIGIT)
    differences = [abs(a - b) for a, b in zip(_evaluated(dense), _evaluated(sparse), strict=True)]
    # Two rounded losses may differ by one last digit where nothing else does.
    assert min(differences) > 5 * LAST_PRINTED_LOSS_DIGIT * max(_evaluated(dense))
    assert_same_steps(dense.steps, sparse.steps)


def _evaluated(run: TrainingRun) -> list[float]:
    """Validation and test losses, in the order printed."""
    return [float(loss) for loss in re.findall(r"lm loss value: ([-+.\dE]+) ", run.output)]


def _train(
    ranks: int, documents: Path, batching: str, tuning: str, *extra: str, **options: Any
) -> TrainingRun:
    plan_settings = ("--sparse-balance-batching", batching, "--sparse-balance-tuning", tuning)
    return train(ranks, documents, *plan_settings, *extra, **options).require_success()
