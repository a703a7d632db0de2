# SPDX-License-Identifier: Apache-2.0
"""The real training loop on gloo ranks: parallel layouts, recompute, invariance, density."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    TrainingRun,
    long_tailed_lengths,
    run_training,
    write_documents,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 8 * 2.0**-23
"""Layouts differ in the order of float32 sums only."""
LAST_PRINTED_DIGIT = 1.01e-3
"""Of gradient norms."""
LAST_PRINTED_LOSS_DIGIT = 1e-6
"""Relative: seven digits."""

LAYOUTS = {
    "dp2": (2, ()),
    "pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "dp2-pp2": (4, ("--pipeline-model-parallel-size", "2")),
    "pp2-virtual2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
    "tp2": (2, ("--tensor-model-parallel-size", "2")),
    "dp2-distributed-optimizer": (
        2,
        ("--use-distributed-optimizer", "--overlap-grad-reduce"),
    ),
    "dp2-full-recompute": (
        2,
        *[
            (
                "--recompute-granularity",
                "full",
                "--recompute-method",
                "uniform",
                "--recompute-num-layers",
                "1",
            )
        ],
    ),
    "dp2-selective-recompute": (2, ("--recompute-granularity", "selective")),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("documents") / "train"
    return write_documents(prefix, long_tailed_lengths(60, longest=250))


@pytest.fixture(scope="module")
def start(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the untrained model: unlike initialising, loading ignores the layout."""
    directory = tmp_path_factory.mktemp("start")
    save = ("--save", str(directory), "--save-interval", "1", "--ckpt-format", "torch_dist")
    flags = (*_flags(documents, "arrival", "off"), *save)
    flags = _replace(_replace(flags, "--train-iters", "1"), "--lr", "1e-30")
    run_training(1, flags).require_success()
    return directory


@pytest.fixture(scope="module")
def reference(
    documents: Path, start: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingRun:
    """One rank, order of arrival, base budgets."""
    return _train(1, documents, start, "arrival", "off", log_dir=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_to_the_losses_of_one_rank(
    layout: str, documents: Path, start: Path, reference: TrainingRun, tmp_path: Path
) -> None:
    """Invariants 3 and 4: batching changes no mathematics, on any layout, recomputed or not."""
    ranks, extra = LAYOUTS[layout]
    run = _train(ranks, documents, start, "latency", "off", *extra, log_dir=tmp_path)
    assert len(run.losses) == len(reference.losses) == 4
    assert [step["lm_loss"] for step in run.steps] == pytest.approx(
        [step["lm_loss"] for step in reference.steps], rel=FEW_ROUNDINGS
    )
    assert [float(x) for x in run.grad_norms] == pytest.approx(
        [float(x) for x in reference.grad_norms], abs=LAST_PRINTED_DIGIT
    )
    assert [step["tokens"] for step in run.steps] == [step["tokens"] for step in reference.steps]


@pytest.mark.parametrize("layout", ["dp2", "dp2-pp2", "pp2-virtual2", "dp2-full-recompute"])
def test_tuned_training_measures_every_micro_batch_and_holds_coverage(
    layout: str, documents: Path, start: Path, tmp_path: Path
) -> None:
    """After the first step (hooks go in with its first forward) every time is known."""
    ranks, extra = LAYOUTS[layout]
    run = _train(ranks, documents, start, "latency", "makespan", *extra, log_dir=tmp_path)
    for step in run.steps[1:]:
        forward = _flatten(step["measured"]["forward_ms"])
        backward = _flatten(step["measured"]["backward_ms"])
        assert all(time > 0 for time in forward + backward)
        assert step["coverage"]["mean"] >= step["coverage"]["base_mean"] - 0.1
    assert run.steps[-1]["predicted"]["samples_cut"] + run.steps[-1]["predicted"]["samples_raised"]


def test_anchor_tuning_trains_and_reaches_the_log_line_and_tensorboard(
    documents: Path, start: Path, tmp_path: Path
) -> None:
    tensorboard = ("--tensorboard-dir", str(tmp_path / "tensorboard"))
    run = _train(2, documents, start, "length", "anchor", *tensorboard, log_dir=tmp_path)
    assert len(run.losses) == 4
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("imbalance", "predicted-to-measured", "coverage", "tuned-samples"):
        assert f"| sparse-balance/{name}: " in run.output
        assert len(events.Scalars(f"sparse-balance/{name}")) == 4
    logged = [scalar.value for scalar in events.Scalars("sparse-balance/coverage")]
    assert logged == pytest.approx([step["coverage"]["mean"] for step in run.steps], rel=1e-6)


def test_evaluation_between_steps_leaves_training_as_it_was(
    documents: Path, start: Path, tmp_path: Path
) -> None:
    """Evaluation has plans of its own, and Megatron takes the hooks out around it."""
    extra = ("--split", "80,10,10", "--eval-iters", "2", "--eval-interval", "2")
    with_evaluation = _train(
        2, documents, start, "latency", "makespan", *extra, log_dir=tmp_path / "with"
    )
    without = _train(
        2, documents, start, "latency", "makespan", *extra[:2], log_dir=tmp_path / "without"
    )
    assert "validation loss at iteration 2" in with_evaluation.output
    assert [step["lm_loss"] for step in with_evaluation.steps] == [
        step["lm_loss"] for step in without.steps
    ]
    assert all(time > 0 for time in _flatten(with_evaluation.steps[-1]["measured"]["forward_ms"]))


def test_budgets_that_cover_everything_are_dense_attention(documents: Path, start: Path) -> None:
    """Invariant 4: whatever the block size, a budget of all blocks is dense causal attention."""
    dense = ("--sparse-balance-base-budget", "1000")
    small = _train(1, documents, start, "arrival", "off", *dense)
    large = _train(
        1, documents, start, "arrival", "off", *dense, "--sparse-balance-block-size", "256"
    )
    assert [float(x) for x in small.losses] == pytest.approx(
        [float(x) for x in large.losses], rel=FEW_ROUNDINGS + LAST_PRINTED_LOSS_DIGIT
    )


def _train(
    ranks: int,
    documents: Path,
    start: Path,
    batching: str,
    tuning: str,
    *extra: str,
    log_dir: Path | None = None,
) -> TrainingRun:
    load = ("--load", str(start), "--finetune", "--ckpt-format", "torch_dist")
    flags = (*_flags(documents, batching, tuning), *load, *extra)
    return run_training(ranks, flags, log_dir=log_dir).require_success()


def _flags(documents: Path, batching: str, tuning: str) -> tuple[str, ...]:
    return (
        *MODEL_FLAGS,
        *TRAINING_FLAGS,
        *BALANCE_FLAGS,
        *("--data-path", str(documents)),
        *("--sparse-balance-batching", batching, "--sparse-balance-tuning", tuning),
    )


def _replace(flags: tuple[str, ...], name: str, value: str) -> tuple[str, ...]:
    position = flags.index(name)
    return (*flags[: position + 1], value, *flags[position + 2 :])


def _flatten(nested: list) -> list[float]:
    if not isinstance(nested, list):
        return [nested]
    return [leaf for item in nested for leaf in _flatten(item)]
