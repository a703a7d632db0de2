# SPDX-License-Identifier: Apache-2.0
"""The entry point with a slow device: rank 1 sleeps in every layer before it attends.

Start with ``--sparse-balance-device cpu``.
"""

from __future__ import annotations

import time
from typing import Any

from sparsebalance_megatron.megatron import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402

SLEEP_S = 0.2
SLOW_RANK = 1

inner = TransformerLayer._forward_attention


def slow(*arguments: Any, **keywords: Any) -> Any:
    if torch.distributed.get_rank() == SLOW_RANK:
        time.sleep(SLEEP_S)
    return inner(*arguments, **keywords)


TransformerLayer._forward_attention = slow
main()
