# SPDX-License-Identifier: Apache-2.0
"""The patches for Megatron-LM's own script: what they say, and what they do to a real checkout."""

import os
import re
import shutil
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))
RUNNER = REPOSITORY / "tests" / "programs" / "upstream_pretrain.py"
FLAGS = (
    *MODEL_FLAGS,
    *TRAINING_FLAGS,
    *("--train-iters", "3", "--pipeline-model-parallel-size", "2", "--ckpt-format", "torch_dist"),
)


def lines_of(patch: Path, kinds: str) -> list[str]:
    """Lines of the hunks, the headers left out: "+" added, "-" removed, " " context."""
    body = patch.read_text("utf-8").partition("@@")[2]
    return [line[1:] for line in body.splitlines() if line[:1] in tuple(kinds)]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_calls_public_names_that_exist(patch: Path) -> None:
    added = "\n".join(lines_of(patch, "+"))
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


def test_without_the_flag_nothing_is_asked_and_no_default_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--sparse-balance-block-size", "64"])
    assert not integration.is_enabled(Namespace())

    def script_flags(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--dataloader-type", default=None)
        return parser

    parser = integration.arguments_provider(script_flags)(ArgumentParser())
    args = parser.parse_args(["--sparse-balance-block-size", "64"])
    assert args.dataloader_type is None
    assert args.sparse_balance is False


def test_with_the_flag_defaults_change_and_mistakes_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sparse-balance", "--data-path", "prefix", "--lr", "1e-5"]
    flags += ["--train-iters", "10", "--eval-interval", "1000", "--seq-length", "256"]
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags])
    parser = ArgumentParser()
    parser.add_argument("--dataloader-type", default=None)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--lr", type=float)
    for name in ("--train-iters", "--eval-interval", "--seq-length"):
        parser.add_argument(name, type=int)
    args = integration.arguments_provider()(parser).parse_args(flags)
    assert args.dataloader_type == "external"
    assert integration.is_enabled(args)
    args.sparse_balance_device = "cpu"
    for ask, arguments, message in (
        (integration.is_enabled, Namespace(), "--yaml-cfg"),
        (integration.training_hooks, args, "--sparse-balance-device cpu"),
    ):
        with pytest.raises(SystemExit) as end:
            ask(arguments)
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sparse balance: error: ")
        assert message in line


def apply(patch: Path, checkout: Path, *options: str) -> None:
    command = ["git", "apply", "--unsafe-paths", *options, str(patch)]
    # Nothing above the copy may be taken for its repository.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def minor_of(patch: Path) -> int:
    """19 of ``megatron-lm-core_v0.19.0.patch``."""
    return int(re.search(r"_v0\.(\d+)\.", patch.name)[1])


def patch_for(checkout: Path) -> Path:
    """The newest patch that is not of a later release than ``megatron/core/package_info.py``."""
    text = (checkout / "megatron" / "core" / "package_info.py").read_text("utf-8")
    major, minor = (
        int(re.search(rf"^{part} = (\d+)$", text, re.M)[1]) for part in ("MAJOR", "MINOR")
    )
    found = [patch for patch in PATCHES if major == 0 and minor_of(patch) <= minor]
    if not found:
        pytest.skip(
            f"MEGATRON_LM_PATH holds megatron-core {major}.{minor}, older than every patch: "
            "whether one applies and how it trains is not tried"
        )
    return max(found, key=minor_of)


@pytest.mark.distributed
@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ,
    reason="MEGATRON_LM_PATH names no Megatron-LM checkout: whether a patch applies and comes out "
    "again, changes no bit with the flag off, and trains as the plugin's own entry point is not "
    "tried",
)
class TestRealCheckout:
    @pytest.fixture(scope="class")
    def directory(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("patches")

    @pytest.fixture(scope="class")
    def unpatched(self, directory: Path) -> Path:
        """The script, what it imports from beside it, and Megatron; of a repository as of HEAD."""
        source, target = Path(os.environ["MEGATRON_LM_PATH"]), directory / "unpatched"
        target.mkdir()
        if (source / ".git").exists():
            command = ["git", "-C", str(source), "archive", "HEAD", "megatron", ":(glob)*.py"]
            archive = subprocess.run(command, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
        else:
            shutil.copytree(source / "megatron", target / "megatron")
            for path in source.glob("*.py"):
                shutil.copy(path, target)
        return target

    @pytest.fixture(scope="class")
    def patched(self, directory: Path, unpatched: Path) -> Path:
        shutil.copytree(unpatched, directory / "patched")
        apply(patch_for(unpatched), directory / "patched")
        return directory / "patched"

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        def train(
            checkout: Path, *flags: str, log_dir: Path | None = None, module: str = ""
        ) -> TrainingRun:
            monkeypatch.setenv("MEGATRON_LM_PATH", str(checkout))
            program = (str(RUNNER), *(("-m", module) if module else ()))
            flags = (*FLAGS, *flags)
            done = run_training(2, flags, log_dir=log_dir, program=program, torchrun=True)
            return done.require_success()

        yield train

    def test_it_applies_and_comes_out_again(self, unpatched: Path, patched: Path) -> None:
        patch = patch_for(unpatched)
        apply(patch, unpatched, "--check")
        apply(patch, patched, "--check", "--reverse")

    def test_off_it_trains_as_unpatched(self, unpatched: Path, patched: Path, run: Any) -> None:
        plain, off = (run(checkout, "--mock-data") for checkout in (unpatched, patched))
        assert len(plain.losses) == 3
        assert (off.losses, off.grad_norms) == (plain.losses, plain.grad_norms)

    def test_on_it_trains_as_the_plugins_own_entry_point(
        self, unpatched: Path, patched: Path, directory: Path, run: Any
    ) -> None:
        documents = write_documents(directory / "train", long_tailed_lengths(30, longest=250))
        flags = (*BALANCE_FLAGS, "--data-path", str(documents))
        on = run(patched, *flags, log_dir=directory / "on")
        entry_point = "sparsebalance_megatron.pretrain_gpt"
        own = run(unpatched, *flags, log_dir=directory / "own", module=entry_point)
        assert len(on.losses) == 3
        assert (on.losses, on.grad_norms) == (own.losses, own.grad_norms)
        assert_same_steps(on.steps, own.steps)
        predicted = on.steps[-1]["predicted"]
        assert predicted["samples_cut"] + predicted["samples_raised"] > 0
        assert all((measured_ms(step)[0] > 0).all() for step in on.steps)
