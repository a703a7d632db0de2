# SPDX-License-Identifier: Apache-2.0
"""What ranks of all runs share: imported once, in the process that they are forked from."""

from sparsebalance_megatron.megatron import cpu

cpu.install()

import sparsebalance_megatron.pretrain_gpt
import sparsebalance_megatron.training.resume
import sparsebalance_megatron.training.training_hooks  # noqa: F401
