# SPDX-License-Identifier: Apache-2.0
"""Training in segments through ``megatron.training`` gives what micro-batches in one piece give."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import PROGRAMS, train, write_documents

from sparsebalance_megatron.log.log_directory import rank_log_path

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 1e-5
"""Relative; weights follow sums of float32 in another order for four steps."""

PIPELINE = ("--pipeline-model-parallel-size", "2")


def test_segments_train_like_one_piece(documents: Path, tmp_path: Path) -> None:
    plan = ("--sparse-balance-batching", "arrival", "--sparse-balance-tuning", "off")
    one, four = (
        train(
            *(2, documents, *PIPELINE, *plan, "--sparse-balance-max-segments", segments),
            log_dir=tmp_path / segments,
            program=(str(PROGRAMS / "drawn_segments.py"), "--sparse-balance-device", "cpu"),
        ).require_success()
        for segments in ("1", "4")
    )
    assert len(four.losses) == 4
    assert [step["lm_loss"] for step in four.steps] == pytest.approx(
        [step["lm_loss"] for step in one.steps], rel=FEW_ROUNDINGS
    )
    assert [float(norm) for norm in four.grad_norms] == pytest.approx(
        [float(norm) for norm in one.grad_norms], abs=2e-3
    )
    for cut, whole in zip(four.steps, one.steps, strict=True):
        assert cut["tokens"] == whole["tokens"]
        assert cut["coverage"]["mean"] == pytest.approx(whole["coverage"]["mean"], rel=1e-4)
    spans = [_forwards(tmp_path / segments) for segments in ("1", "4")]
    assert spans[1] > spans[0]


def _forwards(log_dir: Path) -> int:
    """Forwards that rank 0 measured."""
    return rank_log_path(log_dir, 0).read_text().count('"forward"')


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
