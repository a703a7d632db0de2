# SPDX-License-Identifier: Apache-2.0
"""A Megatron that is missing or too old ends commands and training in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, *COMMANDS[command]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "error: " in line and reason in line
