# SPDX-License-Identifier: Apache-2.0
"""Members of a context group choose the blocks that one rank would choose, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from harness import PROGRAMS, free_port, python_environment

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("members", [2, 3])
def test_lists_are_those_of_one_rank_and_curves_the_same_on_all(
    members: int, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    environment = python_environment()
    environment["PYTHONPATH"] += os.pathsep + str(PROGRAMS.parent)
    exit_code = run_ranks(
        members,
        (str(PROGRAMS / "shared_ranking_rank.py"),),
        environment=environment,
        master_port=free_port(),
        output=output,
        timeout_s=120.0,
    )
    assert exit_code == 0, output.read_text()[-4000:]
