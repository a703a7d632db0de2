# SPDX-License-Identifier: Apache-2.0
"""Two ranks that exchange tokens in every layer of experts, in Megatron's own loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    long_tailed_lengths,
    run_training,
    write_documents,
)

from sparsebalance_megatron import cli
from sparsebalance_megatron.plan.job import lockstep_notice

EXPERTS = """
    --num-experts 4 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
    --moe-aux-loss-coeff 0 --expert-model-parallel-size 2"""
LEARNING = "--sparse-balance-calibration measured --sparse-balance-device cpu --train-iters 8"


@pytest.mark.distributed
def test_ranks_of_an_expert_group_run_long_micro_batches_first_and_every_reader_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_documents(tmp_path / "train", long_tailed_lengths(70, longest=250))
    flags = (*MODEL_FLAGS, *TRAINING_FLAGS, *EXPERTS.split(), *BALANCE_FLAGS, *LEARNING.split())
    data = ("--data-path", str(prefix), "--ckpt-format", "torch_dist")
    log_dir = tmp_path / "log"
    run = run_training(2, (*flags, *data), log_dir=log_dir).require_success()
    notice = lockstep_notice(2)
    assert notice is not None
    assert run.output.count(notice) == 1

    header = json.loads((log_dir / "steps.jsonl").read_text().splitlines()[0])
    assert header["lockstep_ranks"] == 2
    for step in run.steps:
        predicted = step["predicted"]
        ms_2RM = np.sum([predicted["forward_ms"], predicted["backward_ms"]], axis=(2, 3))
        assert (np.diff(ms_2RM.sum(axis=0)) <= 0).all()
        assert predicted["makespan_ms"] == pytest.approx(ms_2RM.max(axis=1).sum(), rel=1e-9)
        assert predicted["device_slowness"] is None
    assert len(run.steps) == 8

    words = " ".join(notice.split())
    for command in (
        ("summary", "--baseline", str(log_dir), "--run", str(log_dir)),
        ("watch", str(log_dir), "--once"),
        ("report", str(log_dir), "-o", str(tmp_path / "page.html")),
    ):
        assert cli.main(command) == 0
        assert words in " ".join(capsys.readouterr().out.split()), command
    assert notice in (tmp_path / "page.html").read_text("utf-8")
