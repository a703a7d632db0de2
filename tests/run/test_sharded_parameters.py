# SPDX-License-Identifier: Apache-2.0
"""Parameters in shards (``--use-torch-fsdp2``): two ranks gather every layer's weights together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import TrainingRun, assert_same_steps, long_tailed_lengths, train, write_documents

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 8 * 2.0**-23
"""Ranks differ in the order of float32 sums only."""
FLAGS = (
    *("--sparse-balance-batching", "makespan", "--sparse-balance-tuning", "off"),
    *("--sparse-balance-device", "cpu"),
)
SHARDED = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--ckpt-format", "torch_dist")
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Megatron refuses FSDP2 where kernels queue up behind one another."""
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-aux-loss-coeff", "0"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


def test_ranks_with_shards_train_to_the_losses_of_one_rank(tmp_path: Path) -> None:
    """Two ranks without shards begin with the same weights as one, so no checkpoint is needed."""
    documents = write_documents(tmp_path / "train", long_tailed_lengths(60, longest=250))
    alone = train(1, documents, *FLAGS, log_dir=tmp_path / "alone").require_success()
    sharded = train(
        *(2, documents, *FLAGS, *SHARDED),
        log_dir=tmp_path / "sharded",
        environment=CONNECTIONS,
    ).require_success()
    header = json.loads((tmp_path / "sharded" / "steps.jsonl").read_text().partition("\n")[0])
    assert header["job"]["lockstep_ranks"] == 2
    assert len(sharded.steps) == len(alone.steps) == 4
    for step, other in zip(sharded.steps, alone.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(other["lm_loss"], rel=FEW_ROUNDINGS)
        assert step["tokens"] == other["tokens"]
    assert sharded.steps[0]["lm_loss"] > sharded.steps[-1]["lm_loss"]


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
    load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", "2")
    resumed = run("resumed", 2, *SHARDED, *load)
    assert [step["iteration"] for step in resumed.steps] == [3, 4]
    assert_same_steps(resumed.steps, whole.steps)
    assert resumed.grad_norms == whole.grad_norms[2:]
    alone = run("alone", 1, "--ckpt-format", "torch_dist", *load)
    losses = [step["lm_loss"] for step in whole.steps[2:]]
    assert alone.logged("lm_loss") == pytest.approx(losses, rel=1e-5)
