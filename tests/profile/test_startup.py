# SPDX-License-Identifier: Apache-2.0
"""Costs measured at start-up reach every rank and the plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import BALANCE_FLAGS, MODEL_FLAGS, TRAINING_FLAGS, run_training, write_documents

from sparsebalance_megatron.cost.table import CostTable

pytestmark = pytest.mark.distributed

AUTO = ("--sparse-balance-cost-table", "auto")


def test_all_ranks_plan_with_what_rank_0_measured(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", [100, 60, 200, 30] * 8)
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, *AUTO, "--data-path", str(documents))
    flags = (*flags, "--train-iters", "1")
    log_dir = tmp_path / "log"
    run = run_training(2, flags, log_dir=log_dir).require_success()
    table = CostTable.load(log_dir / "cost_table.json")
    assert table.identity.block_size == 16
    header = json.loads((log_dir / "steps.jsonl").read_text().splitlines()[0])
    assert header["cost_source"].startswith(f"{len(table.rows)} measurements")
    assert len(run.losses) == 1
