# SPDX-License-Identifier: Apache-2.0
"""Training on three sources, one with a loss mask, and on samples without a trained token."""

import json
import re
from pathlib import Path

import numpy as np
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
    train,
    write_documents,
)

from sparsebalance_megatron.data.documents import write_index

pytestmark = pytest.mark.distributed

STEPS, SAVED = 4, 2
DOCUMENTS = {"web": 6, "books": 5, "chat": 20}
"""Documents of each source. Two steps take 8 samples of the first: the checkpoint lies in the
middle of its second epoch."""
WEIGHTS = {"web": 0.5, "books": 0.3, "chat": 0.2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("blend")
    for seed, (name, documents) in enumerate(DOCUMENTS.items()):
        lengths = long_tailed_lengths(documents, longest=250, seed=seed)
        write_documents(directory / name, lengths, seed=seed, masked=name == "chat")
    return directory


def flags(directory: Path, weights: dict[str, float] = WEIGHTS) -> tuple[str, ...]:
    words = [word for name in weights for word in (str(weights[name]), str(directory / name))]
    return (
        *("--data-path", *words, "--sparse-balance-config", "missing-loss-mask=train"),
        *("--train-iters", str(STEPS), "--pipeline-model-parallel-size", "2"),
        *("--ckpt-format", "torch_dist", "--override-opt-param-scheduler"),
    )


@pytest.fixture(scope="module")
def whole(directory: Path) -> TrainingRun:
    """Never stops."""
    save = ("--save", str(directory / "checkpoints"), "--save-interval", str(SAVED))
    return train(
        2, directory, *flags(directory), *save, log_dir=directory / "log"
    ).require_success()


def test_three_sources_are_told_and_a_resumed_run_equals_one_that_never_stopped(
    directory: Path, whole: TrainingRun
) -> None:
    assert "sparse balance: 3 sources: 31 documents gave" in whole.output
    assert f"source {directory / 'web'}: 50.00% of the samples" in whole.output
    assert f"no loss mask beside {directory / 'web'}, {directory / 'books'}" in whole.output
    load = ("--load", str(directory / "checkpoints"), "--ckpt-step", str(SAVED))
    resumed = train(2, directory, *flags(directory), *load, log_dir=directory / "resumed")
    assert resumed.require_success().grad_norms == whole.grad_norms[SAVED:]
    assert resumed.logged("iteration") == [3, 4]
    assert_same_steps(resumed.steps, whole.steps)


def test_a_changed_blend_is_refused_by_name(directory: Path, whole: TrainingRun) -> None:
    load = ("--load", str(directory / "checkpoints"), "--train-iters", str(STEPS + 2))
    changed = flags(directory, WEIGHTS | {"web": 0.7, "books": 0.1})
    one_stage = ("--pipeline-model-parallel-size", "1")
    run = train(1, directory, *changed, *load, *one_stage, timeout_s=120)
    assert run.exit_code == 2, run.output[-4000:]
    (line,) = {each for each in run.output.splitlines() if "sparse balance: error:" in each}
    for number, words in enumerate(("web, weight 0.7", "books, weight 0.1"), start=1):
        assert f"source {number} is {words}" in line


def test_splits_may_have_sources_of_their_own(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    web, books, chat = (str(directory / name) for name in DOCUMENTS)
    path.write_text(json.dumps({"train": [web, books], "valid": f"1 {chat} 2 {web}", "test": None}))
    words = [word for word in TRAINING_FLAGS if word not in ("--split", "100,0,0")]
    evaluated = ("--train-iters", "1", "--eval-iters", "1", "--eval-interval", "1")
    masks = ("--sparse-balance-config", "missing-loss-mask=train")
    masks = (*masks, "--per-split-data-args-path", str(path))
    run = run_training(1, (*MODEL_FLAGS, *words, *BALANCE_FLAGS, *masks, *evaluated))
    assert "sparse balance: 2 sources: 11 documents gave" in run.require_success().output
    assert "validation loss at iteration 1" in run.output


@pytest.mark.parametrize("untrained", [{1, 2, 3}, {0, 1, 2, 3}])
def test_steps_without_a_trained_token_keep_the_loss_of_their_log_interval(
    untrained: set[int], tmp_path: Path
) -> None:
    """Documents 4 to 7 validate, and none of them has a target: Megatron prints a loss of 0."""
    lengths = [120, 80, 200, 60, 150, 90, 110, 70]
    documents = write_documents(tmp_path / "train", lengths)
    masks = [np.ones(length, np.uint8) for length in lengths]
    for document in untrained | {4, 5, 6, 7}:
        masks[document][1:] = 0  # the first token is no target
    Path(f"{documents}_loss_mask.bin").write_bytes(np.concatenate(masks).tobytes())
    write_index(Path(f"{documents}_loss_mask.idx"), lengths, np.uint8)
    flags = ("--global-batch-size", "2", "--log-interval", "4", "--train-iters", "4")
    flags += ("--split", "50,50,0", "--eval-iters", "1", "--eval-interval", "4")
    run = train(2, documents, *flags, log_dir=tmp_path / "log")
    assert run.exit_code == 0, run.output
    said = re.findall(r"sparse balance: (.*) samples have no trained token", run.output)
    assert said == [f"{len(untrained)} of the first 4", "validation: 4 of the first 4"]
    (printed,) = re.findall(r"iteration +4/.*", run.output)
    losses = [step["lm_loss"] for step in read_steps(tmp_path / "log")]
    assert len(losses) == 4
    found = re.search(r"lm loss: ([\d.E+-]+)", printed)
    assert found is not None
    mean = sum(loss or 0.0 for loss in losses) / 4
    assert float(found[1]) == pytest.approx(mean, rel=1e-4)
    assert "number of nan iterations:   0" in printed
    assert "validation loss at iteration 4 | lm loss value: 0.000000E+00" in run.output
