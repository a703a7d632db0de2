# SPDX-License-Identifier: Apache-2.0
"""Training in segments through ``megatron.training`` gives what micro-batches in one piece give."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import PROGRAMS, train, write_documents

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 1e-5
"""Relative; weights follow sums of float32 in another order for four steps."""

PIPELINE = ("--pipeline-model-parallel-size", "2")


def test_planned_segments_train(tmp_path: Path) -> None:
    """The planner itself cuts micro-batches, and the run learns what one piece learns."""
    documents = write_documents(tmp_path / "train", [250, 230, 240, 245] * 4)
    one, four = (
        train(
            *(2, documents, *PIPELINE, "--sparse-balance-tuning", "off"),
            *("--global-batch-size", "2", "--sparse-balance-segment-tokens", "32"),
            *("--sparse-balance-max-segments", segments),
            log_dir=tmp_path / segments,
            program=(str(PROGRAMS / "free_segments.py"), "--sparse-balance-device", "cpu"),
        ).require_success()
        for segments in ("1", "4")
    )
    assert [step["lm_loss"] for step in four.steps] == pytest.approx(
        [step["lm_loss"] for step in one.steps], rel=FEW_ROUNDINGS
    )
    assert all(max(map(max, step["segments"])) > 1 for step in four.steps)
