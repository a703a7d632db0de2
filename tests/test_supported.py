# SPDX-License-Identifier: Apache-2.0
"""A Megatron that is missing or too old ends commands and training in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data.tokenizers_of_tests import save_tokenizer

OLD = "__version__ = '0.15.0'\n"
COMMANDS = {
    "profile": ("-m", "sparsebalance_megatron.cli", "profile", "-o", "t", "--", "--bf16"),
    "training": ("-m", "sparsebalance_megatron.pretrain_gpt", "--sparse-balance"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"megatron/__init__.py": ""}, "no megatron.core is found"),
        (
            {"megatron/core/package_info.py": OLD, "megatron/__init__.py": ""},
            "version 0.15.0 is outside",
        ),
        (
            {"torch/__init__.py": "raise ModuleNotFoundError('no torch', name='torch')"},
            "the package torch is not installed",
        ),
    ],
    ids=["no Megatron", "an old Megatron", "no torch"],
)
def test_one_line_says_what_is_missing(
    files: dict[str, str], reason: str, command: str, tmp_path: Path
) -> None:
    check_one_line(files, reason, COMMANDS[command], tmp_path)


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("examples", "msgspec"),
        ("plan --gpus 1 --model x -- --data-path y", "torch"),
        ("convert to-hf x --hf-config x -o y", "safetensors"),
        ("prepare-data --input x --tokenizer tokenizer --output-prefix y", "transformers"),
        ("prepare-data --input x.parquet --tokenizer tokenizer --output-prefix y", "pyarrow"),
    ],
)
def test_a_command_needs_no_package_to_say_which_is_missing(
    words: str, package: str, tmp_path: Path
) -> None:
    raises = f"raise ModuleNotFoundError('no {package}', name='{package}')"
    command = ("-m", "sparsebalance_megatron.cli", *words.split())
    save_tokenizer(tmp_path / "tokenizer")
    for name in ("x", "x.parquet"):
        (tmp_path / name).write_text('{"text": "a"}')
    check_one_line({f"{package}.py": raises}, f"the package {package} is not", command, tmp_path)


def check_one_line(
    files: dict[str, str], reason: str, command: tuple[str, ...], directory: Path
) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    paths = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "error: " in line and reason in line
