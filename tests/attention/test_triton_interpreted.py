# SPDX-License-Identifier: Apache-2.0
"""Runs triton/ under Triton's interpreter.

In a process of its own: Triton decides when a kernel is defined, its own library's included,
whether it will be interpreted, and no other test must run interpreted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from older_releases import needs_interpreter

KERNEL_TESTS = Path(__file__).parent / "triton"


@needs_interpreter
@pytest.mark.parametrize(
    "file",
    [
        "test_column_kernels.py",
        "test_kernels.py",
        "test_router_kernels.py",
        "test_token_kernels.py",
    ],
)
def test_kernels_on_the_cpu(file: str) -> None:
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    tests = os.fspath(KERNEL_TESTS / file)
    command = [sys.executable, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        command, env=environment, cwd=KERNEL_TESTS.parents[2], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout), result.stdout
    assert "skipped" not in result.stdout, result.stdout
