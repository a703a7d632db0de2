# SPDX-License-Identifier: Apache-2.0
"""Ranks that would plan differently are found before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    PROGRAMS,
    TRAINING_FLAGS,
    run_training,
    write_documents,
)

pytestmark = pytest.mark.distributed


def test_ranks_with_different_flags_stop_at_start_and_name_the_flag(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", [100, 60, 200, 30] * 4)
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, "--data-path", str(documents))
    program = (str(PROGRAMS / "disagreeing_rank.py"),)
    run = run_training(2, flags, program=program, timeout_s=120)
    assert run.exit_code != 0
    assert "flag base_budget: rank 0 has '4', rank 1 has '2'" in run.output
    assert not run.losses
