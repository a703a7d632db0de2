# SPDX-License-Identifier: Apache-2.0
"""A Megatron that is missing or too old, or another package, ends commands in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from data.tokenizers_of_tests import save_tokenizer
from harness import REPOSITORY

NOTHING = {"megatron/__init__.py": ""}
OLD = {"megatron/core/package_info.py": "__version__ = '0.15.0'\n", **NOTHING}
FILES = {"x": '{"text": "a"}', "x.parquet": '{"text": "a"}'}
CLI, TRAINING = "sparsebalance_megatron.cli", "sparsebalance_megatron.pretrain_gpt"


def without(package: str) -> dict[str, str]:
    return {f"{package}.py": f"raise ModuleNotFoundError('no {package}', name='{package}')"}


@pytest.mark.parametrize(
    ("command", "files", "reason"),
    [
        *(
            case
            for words in (f"{CLI} profile -o table -- --bf16", f"{TRAINING} --sparse-balance")
            for case in (
                (words, NOTHING, "no megatron.core is found"),
                (words, OLD, "version 0.15.0 is outside"),
                (words, without("torch"), "the package torch is not installed"),
            )
        ),
        *(
            (f"{CLI} {words}", without(package), f"the package {package} is not installed")
            for words, package in {
                "examples": "msgspec",
                "plan --gpus 1 --model x -- --data-path y": "torch",
                "convert to-hf x --hf-config x -o y": "safetensors",
                "prepare-data --input x --tokenizer t --output-prefix y": "transformers",
                "prepare-data --input x.parquet --tokenizer t --output-prefix y": "pyarrow",
            }.items()
        ),
    ],
)
def test_one_line_says_what_is_missing(
    command: str, files: dict[str, str], reason: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "t")
    for name, text in (FILES | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", *command.split()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "error: " in line and reason in line
