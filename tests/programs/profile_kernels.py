# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance profile`` where FlashAttention-4 serves, emulated, and torch's kernel of whole
documents is slow. The arguments are the command's."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from oracles import flash_attention_4

from sparsebalance_megatron import cli
from sparsebalance_megatron.attention.kernels import dense, fa4

torchs = dense.forward


def slow(*tensors: Any, **named: Any) -> Any:
    time.sleep(0.2)
    return torchs(*tensors, **named)


fa4.interface, fa4.obstacle = lambda: flash_attention_4, lambda *_: None
dense.forward = slow
sys.exit(cli.main(["profile", *sys.argv[1:]]))
