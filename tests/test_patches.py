# SPDX-License-Identifier: Apache-2.0
"""The patch for Megatron-LM's own script: what it says, and what it does to a real checkout."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    REPOSITORY,
    TRAINING_FLAGS,
    TrainingRun,
    assert_same_steps,
    long_tailed_lengths,
    measured_ms,
    run_training,
    write_documents,
)

from sparsebalance_megatron import integration
from sparsebalance_megatron.run.training_hooks import TrainingHooks

(PATCH,) = (REPOSITORY / "patches").glob("*.patch")
pytestmark = pytest.mark.distributed
RUNNER = REPOSITORY / "tests" / "programs" / "upstream_pretrain.py"
FLAGS = (
    *MODEL_FLAGS,
    *TRAINING_FLAGS,
    *("--train-iters", "3", "--pipeline-model-parallel-size", "2", "--ckpt-format", "torch_dist"),
)


def test_the_patch_calls_public_names_that_exist() -> None:
    added = "\n".join(re.findall(r"^\+(?!\+)(.*)", PATCH.read_text("utf-8"), re.MULTILINE))
    called = set(re.findall(r"sparse_balance\.(\w+)", added))
    assert called == {"arguments_provider", "is_enabled", "training_hooks"}
    assert called <= set(integration.__all__)
    attributes = set(re.findall(r"hooks\.(\w+)", added))
    assert {"dataset_provider", "forward_step"} < attributes
    # Set in the constructor, not on the class.
    assert all(hasattr(TrainingHooks, name) for name in attributes - {"forward_step"})
    assert re.findall(r"sparsebalance_megatron.*", added) == [
        "sparsebalance_megatron import integration as sparse_balance"
    ]


def apply(checkout: Path, *options: str) -> None:
    command = ["git", "apply", "--unsafe-paths", *options, str(PATCH)]
    # Nothing above the copy may be taken for its repository.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patches")


@pytest.fixture(scope="module")
def unpatched(directory: Path) -> Path:
    """The script, what it imports from beside it, and Megatron."""
    if "MEGATRON_LM_PATH" not in os.environ:
        pytest.skip(
            "MEGATRON_LM_PATH names no Megatron-LM checkout: whether a patch applies and comes out "
            "again, changes no bit with the flag off, and trains as the plugin's own entry point "
            "is not tried"
        )
    source, target = Path(os.environ["MEGATRON_LM_PATH"]), directory / "unpatched"
    target.mkdir()
    shutil.copytree(source / "megatron", target / "megatron")
    for path in source.glob("*.py"):
        shutil.copy(path, target)
    return target


@pytest.fixture(scope="module")
def patched(directory: Path, unpatched: Path) -> Path:
    shutil.copytree(unpatched, directory / "patched")
    apply(directory / "patched")
    return directory / "patched"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingRun]:
    def train(
        checkout: Path, *flags: str, log_dir: Path | None = None, module: str = ""
    ) -> TrainingRun:
        monkeypatch.setenv("MEGATRON_LM_PATH", str(checkout))
        program = (str(RUNNER), *(("-m", module) if module else ()))
        flags = (*FLAGS, *flags)
        done = run_training(2, flags, log_dir=log_dir, program=program, torchrun=True)
        return done.require_success()

    return train


def test_it_applies_and_comes_out_again(unpatched: Path, patched: Path) -> None:
    apply(unpatched, "--check")
    apply(patched, "--check", "--reverse")


def test_off_it_trains_as_unpatched(
    unpatched: Path, patched: Path, run: Callable[..., TrainingRun]
) -> None:
    plain, off = (run(checkout, "--mock-data") for checkout in (unpatched, patched))
    assert len(plain.losses) == 3
    assert (off.losses, off.grad_norms) == (plain.losses, plain.grad_norms)


def test_on_it_trains_as_the_plugins_own_entry_point(
    unpatched: Path, patched: Path, directory: Path, run: Callable[..., TrainingRun]
) -> None:
    documents = write_documents(directory / "train", long_tailed_lengths(30, longest=250))
    flags = (*BALANCE_FLAGS, "--data-path", str(documents))
    on = run(patched, *flags, log_dir=directory / "on")
    entry_point = "sparsebalance_megatron.pretrain_gpt"
    own = run(unpatched, *flags, log_dir=directory / "own", module=entry_point)
    assert len(on.losses) == 3
    assert (on.losses, on.grad_norms) == (own.losses, own.grad_norms)
    assert_same_steps(on.steps, own.steps)
    assert all((measured_ms(step)[0] > 0).all() for step in on.steps)
