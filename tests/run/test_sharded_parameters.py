# SPDX-License-Identifier: Apache-2.0
"""Parameters in shards (``--use-torch-fsdp2``): two ranks gather every layer's weights together."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import TrainingRun, assert_same_steps, long_tailed_lengths, train, write_documents

from sparsebalance_megatron.log.reader import read_run_log

pytestmark = pytest.mark.distributed

SHARDED = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--ckpt-format", "torch_dist")
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Megatron refuses FSDP2 where kernels queue up behind one another."""
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "0"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


def test_a_resumed_run_equals_one_that_never_stopped_with_shards_and_without(
    tmp_path: Path,
) -> None:
    """Weights, the optimizer's moments and its number of steps, and what the plugin has learnt."""
    documents = write_documents(tmp_path / "train", long_tailed_lengths(60, longest=250))

    def run(name: str, ranks: int, *flags: str) -> TrainingRun:
        flags = (*EXPERTS, "--sparse-balance-device", "cpu", *flags)
        return train(
            *(ranks, documents, *flags), log_dir=tmp_path / name, environment=CONNECTIONS
        ).require_success()

    whole = run(
        "whole", 2, *SHARDED, "--save", str(tmp_path / "checkpoint"), "--save-interval", "2"
    )
    assert read_run_log(tmp_path / "whole").header.job.lockstep_ranks == 2
    load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", "2")
    resumed = run("resumed", 2, *SHARDED, *load)
    assert [step["iteration"] for step in resumed.steps] == [3, 4]
    assert_same_steps(resumed.steps, whole.steps)
    assert resumed.grad_norms == whole.grad_norms[2:]
    alone = run("alone", 1, "--ckpt-format", "torch_dist", *load)
    losses = [step["lm_loss"] for step in whole.steps[2:]]
    assert alone.logged("lm_loss") == pytest.approx(losses, rel=1e-5)
