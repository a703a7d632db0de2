# SPDX-License-Identifier: Apache-2.0
"""Invariant 1: with the flag off, losses are those of Megatron without the plugin."""

import os

import pytest
from harness import MODEL_FLAGS, PROGRAMS, TRAINING_FLAGS, run_training

pytestmark = pytest.mark.distributed

FLAGS = (*MODEL_FLAGS, *TRAINING_FLAGS, "--mock-data")
PLAIN = PROGRAMS / "plain_megatron.py"
UPSTREAM = PROGRAMS / "upstream_pretrain.py"


@pytest.mark.parametrize("layout", [(), ("--pipeline-model-parallel-size", "2")])
def test_flag_off_is_bit_identical_to_a_run_that_never_imports_the_plugin(
    layout: tuple[str, ...],
) -> None:
    ours = run_training(2, (*FLAGS, *layout)).require_success()
    plain = run_training(2, (*FLAGS, *layout), program=(str(PLAIN),)).require_success()
    assert len(ours.losses) == 4
    assert ours.losses == plain.losses
    assert ours.grad_norms == plain.grad_norms


@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ,
    reason="MEGATRON_LM_PATH names no Megatron-LM checkout whose pretrain_gpt.py to compare with",
)
def test_flag_off_is_bit_identical_to_upstreams_own_script() -> None:
    ours = run_training(2, FLAGS).require_success()
    upstream = run_training(2, FLAGS, program=(str(UPSTREAM),), torchrun=True).require_success()
    assert ours.losses == upstream.losses
