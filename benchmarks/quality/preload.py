# SPDX-License-Identifier: Apache-2.0
"""What ranks of all runs share: imported once, in the process that they are forked from."""

from importlib import import_module

from sparsebalance_megatron.megatron import cpu

# Before megatron.training, which asks for CUDA as it is imported.
cpu.install()

for name in (
    "quality.arm_session",
    "quality.proxy",
    "quality.scoring",
    "sparsebalance_megatron.pretrain_gpt",
    "sparsebalance_megatron.run.session",
):
    import_module(name)
