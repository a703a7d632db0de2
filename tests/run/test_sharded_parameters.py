# SPDX-License-Identifier: Apache-2.0
"""Parameters in shards (``--use-torch-fsdp2``): two ranks gather every layer's weights together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import long_tailed_lengths, train, write_documents

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 8 * 2.0**-23
"""Ranks differ in the order of float32 sums only."""
FLAGS = (
    *("--sparse-balance-batching", "makespan", "--sparse-balance-tuning", "off"),
    *("--sparse-balance-device", "cpu"),
)
SHARDED = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--ckpt-format", "torch_dcp")


def test_ranks_with_shards_train_to_the_losses_of_one_rank(tmp_path: Path) -> None:
    """Two ranks without shards begin with the same weights as one, so no checkpoint is needed."""
    documents = write_documents(tmp_path / "train", long_tailed_lengths(60, longest=250))
    alone = train(1, documents, *FLAGS, log_dir=tmp_path / "alone").require_success()
    # Megatron refuses FSDP2 where kernels queue up behind one another.
    sharded = train(
        *(2, documents, *FLAGS, *SHARDED),
        log_dir=tmp_path / "sharded",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    ).require_success()
    header = json.loads((tmp_path / "sharded" / "steps.jsonl").read_text().partition("\n")[0])
    assert header["lockstep_ranks"] == 2
    assert len(sharded.steps) == len(alone.steps) == 4
    for step, other in zip(sharded.steps, alone.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(other["lm_loss"], rel=FEW_ROUNDINGS)
        assert step["tokens"] == other["tokens"]
    assert sharded.steps[0]["lm_loss"] > sharded.steps[-1]["lm_loss"]
